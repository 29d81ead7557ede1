/* Hyper-connections: mixing coefficients, the collapsed and normalised input, the next streams. */
#include <math.h>

#include "vectors.h"

enum { TOGETHER = 4 }; /* rows that share a pass over the mixing weight */

static inline lanes exponentials(lanes x) {
    float values[LANES];
    memcpy(values, &x, sizeof values);
#pragma omp simd
    for (int i = 0; i < LANES; i++) values[i] = exponential(values[i]);
    return load(values);
}

static inline lanes sigmoids(lanes x) { return 1.0f / (1.0f + exponentials(-x)); }

/* Softmax over rows, then columns and rows in turn, of an n x n matrix for each lane. */
static void sinkhorn(lanes *matrix, int n, int iterations, float eps) {
    for (int i = 0; i < n; i++) {
        lanes most = matrix[i * n], sum = {0};
        for (int j = 1; j < n; j++) most = larger(matrix[i * n + j], most);
        for (int j = 0; j < n; j++) sum += matrix[i * n + j] = exponentials(matrix[i * n + j] - most);
        for (int j = 0; j < n; j++) matrix[i * n + j] = matrix[i * n + j] / sum + eps;
    }
    for (int pass = 0; pass < 2 * iterations - 1; pass++) {
        const int along = pass % 2 ? 1 : n, across = pass % 2 ? n : 1;
        for (int i = 0; i < n; i++) {
            lanes sum = {0};
            for (int j = 0; j < n; j++) sum += matrix[i * across + j * along];
            const lanes factor = 1.0f / (sum + eps);
            for (int j = 0; j < n; j++) matrix[i * across + j * along] *= factor;
        }
    }
}

/* Dot products of TOGETHER rows with one row of the mixing weight. */
static void dots(const float *flat, const float *weight, long size, float *sums) {
    float a = 0, b = 0, c = 0, d = 0;
    const float *second = flat + size, *third = second + size, *fourth = third + size;
#pragma omp simd reduction(+ : a, b, c, d)
    for (long i = 0; i < size; i++) {
        a += flat[i] * weight[i];
        b += second[i] * weight[i];
        c += third[i] * weight[i];
        d += fourth[i] * weight[i];
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

/* One row as floats; returns the sum of its squares. */
static float spread(const bf16 *source, long size, float *row) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < size; i++) {
        row[i] = wide(source[i]);
        sum += row[i] * row[i];
    }
    return sum;
}

/* The collapse of one row's streams by `last`, normalised. */
static void collapse(const float *row, const float *last, int n, long hidden, const bf16 *norm, float eps, bf16 *x) {
    float input[hidden], sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long h = 0; h < hidden; h++) {
        float value = 0;
        for (int i = 0; i < n; i++) value += last[i] * row[i * hidden + h];
        input[h] = rounded(value);
        sum += input[h] * input[h];
    }
    const float root = 1.0f / sqrtf(sum / hidden + eps);
#pragma omp simd
    for (long h = 0; h < hidden; h++) x[h] = narrow(input[h] * root * wide(norm[h]));
}

/* A sub-layer's input and mix.
 *
 * streams: [tokens, n, hidden]. last: [tokens, n], the preceding sub-layer's `pre`. fn: [n (n + 2), n x hidden].
 * Results: x [tokens, hidden], the normalised collapse; pre, post [tokens, n]; comb [tokens, n, n].
 */
void deepinfer_enter(const bf16 *streams, const float *last, long tokens, int n, long hidden, const float *fn,
                     const float *base, const float *scale, float hc_eps, int iterations, const bf16 *norm,
                     float norm_eps, bf16 *x, float *pre, float *post, float *comb) {
    const long size = n * hidden;
    const int width = n * (n + 2);
#pragma omp parallel for schedule(static)
    for (long first = 0; first < tokens; first += LANES) {
        const int count = tokens - first < LANES ? tokens - first : LANES;
        float flat[TOGETHER * size] __attribute__((aligned(64)));
        float mixes[width][LANES], squares[LANES] = {0};
        memset(mixes, 0, sizeof mixes);
        for (int some = 0; some < count; some += TOGETHER) {
            for (int r = 0; r < TOGETHER; r++) {
                const long token = first + some + r;
                if (some + r < count) {
                    squares[some + r] = spread(streams + token * size, size, flat + r * size);
                    collapse(flat + r * size, last + token * n, n, hidden, norm, norm_eps, x + token * hidden);
                } else {
                    memset(flat + r * size, 0, size * sizeof(float));
                }
            }
            for (int o = 0; o < width; o++) dots(flat, fn + o * size, size, mixes[o] + some);
        }
        float factors[LANES], values[LANES];
        for (int r = 0; r < LANES; r++) factors[r] = 1.0f / sqrtf(squares[r] / size + norm_eps);
        lanes logits[width];
        for (int o = 0; o < width; o++)
            logits[o] = base[o] + load(mixes[o]) * load(factors) * scale[o < n ? 0 : (o < 2 * n ? 1 : 2)];
        sinkhorn(logits + 2 * n, n, iterations, hc_eps);
        for (int o = 0; o < width; o++) {
            if (o < n) logits[o] = sigmoids(logits[o]) + hc_eps;
            else if (o < 2 * n) logits[o] = 2.0f * sigmoids(logits[o]);
            memcpy(values, logits + o, sizeof values);
            for (int r = 0; r < count; r++) {
                const long token = first + r;
                if (o < n) pre[token * n + o] = values[r];
                else if (o < 2 * n) post[token * n + o - n] = values[r];
                else comb[token * n * n + o - 2 * n] = values[r];
            }
        }
    }
}

/* The next streams [tokens, n, hidden] from a sub-layer's output [tokens, hidden] and the last streams. */
void deepinfer_expand(const bf16 *output, const bf16 *streams, const float *post, const float *comb, long tokens,
                      int n, long hidden, bf16 *next) {
#pragma omp parallel for schedule(static)
    for (long token = 0; token < tokens; token++) {
        const bf16 *added = output + token * hidden, *from = streams + token * n * hidden;
        for (int j = 0; j < n; j++) {
            const float *factor = comb + token * n * n + j;
            const float own = post[token * n + j];
            bf16 *to = next + (token * n + j) * hidden;
            if (n == 4) {
                const float factors[4] = {factor[0], factor[4], factor[8], factor[12]};
#pragma omp simd
                for (long h = 0; h < hidden; h++)
                    to[h] = narrow(factors[0] * wide(from[h]) + factors[1] * wide(from[hidden + h]) +
                                   factors[2] * wide(from[2 * hidden + h]) +
                                   factors[3] * wide(from[3 * hidden + h]) + own * wide(added[h]));
            } else {
                for (long h = 0; h < hidden; h++) {
                    float value = own * wide(added[h]);
                    for (int i = 0; i < n; i++) value += factor[i * n] * wide(from[i * hidden + h]);
                    to[h] = narrow(value);
                }
            }
        }
    }
}
