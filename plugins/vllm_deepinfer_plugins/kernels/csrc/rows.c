/* Row functions of attention and router: norm, rotation, cache rounding, pooling, expert choice. */
#include <math.h>

#include "common.h"

enum { EXACT, FP8, NVFP4, MXFP4 };

static inline float power_of_two_at_least(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = ((bits >> 23) + ((bits & 0x7fffff) != 0)) << 23;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The nearest E4M3 value of a magnitude up to 448: steps of 2^(exponent - 3), no finer than 2^-9. */
static inline float round_e4m3(float value) {
    const float magnitude = fabsf(value) > 448.0f ? 448.0f : fabsf(value);
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    int exponent = (int)(bits >> 23) - 127;
    exponent = exponent < -6 ? -6 : exponent;
    const uint32_t step_bits = (uint32_t)(exponent - 3 + 127) << 23, inverse_bits = (uint32_t)(3 - exponent + 127) << 23;
    float step, inverse;
    memcpy(&step, &step_bits, sizeof step);
    memcpy(&inverse, &inverse_bits, sizeof inverse);
    return copysignf(nearest(magnitude * inverse) * step, value);
}

/* The nearest E2M1 value: steps of 0.5 below 2, 1 below 4, 2 up to 6. */
static inline float round_e2m1(float value) {
    const float magnitude = fabsf(value) > 6.0f ? 6.0f : fabsf(value);
    const float step = magnitude >= 4 ? 2.0f : (magnitude >= 2 ? 1.0f : 0.5f);
    const float inverse = magnitude >= 4 ? 0.5f : (magnitude >= 2 ? 1.0f : 2.0f);
    return copysignf(nearest(magnitude * inverse) * step, value);
}

/* One row as a cache of that format returns it, in place; a shorter last group has its own scale. */
static void round_row(float *row, long size, int format) {
    const long group = format == NVFP4 ? 16 : 32;
    for (long first = 0; first < size; first += group) {
        const long last = first + group < size ? first + group : size;
        float most = 0, scale;
#pragma omp simd reduction(max : most)
        for (long i = first; i < last; i++) most = fabsf(row[i]) > most ? fabsf(row[i]) : most;
        if (format == FP8) {
            scale = power_of_two_at_least((most < 1e-4f ? 1e-4f : most) * (float)(1 / 448.0));
        } else if (format == NVFP4) {
            scale = round_e4m3((most < 6 * 0x1p-9f ? 6 * 0x1p-9f : most) / 6.0f);
        } else {
            scale = power_of_two_at_least((most < 6 * 0x1p-126f ? 6 * 0x1p-126f : most) * (float)(1 / 6.0));
        }
        if (format == FP8) {
#pragma omp simd
            for (long i = first; i < last; i++) row[i] = round_e4m3(row[i] / scale) * scale;
        } else {
#pragma omp simd
            for (long i = first; i < last; i++) row[i] = round_e2m1(row[i] / scale) * scale;
        }
    }
}

/* Rows through norm (if a weight is given), rotation of the last 2 x pairs channels and cache rounding.
 *
 * in: [tokens x heads] rows of `size` at a stride; out likewise, and may be the same. turns: [tokens, pairs, 2],
 * cosine and sine, or NULL for no rotation.
 */
void deepinfer_rows(const bf16 *in, long in_stride, long tokens, int heads, long size, const bf16 *norm, float eps,
                    const float *turns, int pairs, int inverse, int format, bf16 *out, long out_stride) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < tokens * heads; r++) {
        const bf16 *source = in + r * in_stride;
        bf16 *target = out + r * out_stride;
        float row[size];
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < size; i++) {
            row[i] = wide(source[i]);
            sum += row[i] * row[i];
        }
        if (norm) {
            const float root = 1.0f / sqrtf(sum / size + eps);
#pragma omp simd
            for (long i = 0; i < size; i++) row[i] = rounded(row[i] * root * wide(norm[i]));
        }
        if (turns) {
            const float *turn = turns + r / heads * pairs * 2;
            float *tail = row + size - 2 * pairs;
            const float sign = inverse ? -1.0f : 1.0f;
#pragma omp simd
            for (int p = 0; p < pairs; p++) {
                const float a = tail[2 * p], b = tail[2 * p + 1], c = turn[2 * p], s = sign * turn[2 * p + 1];
                tail[2 * p] = rounded(a * c - b * s);
                tail[2 * p + 1] = rounded(a * s + b * c);
            }
        }
        if (format != EXACT) round_row(row, size, format);
#pragma omp simd
        for (long i = 0; i < size; i++) target[i] = narrow(row[i]);
    }
}

/* Channel-wise softmax pooling of groups [tokens, ratio, 2 x size] (values, then gates) to [tokens, size]. */
void deepinfer_pool(const float *group, long tokens, int ratio, long size, bf16 *out) {
#pragma omp parallel for schedule(static)
    for (long token = 0; token < tokens; token++) {
        const float *first = group + token * ratio * 2 * size;
#pragma omp simd
        for (long i = 0; i < size; i++) {
            float most = first[size + i], sum = 0, value = 0;
            for (int r = 1; r < ratio; r++) {
                const float gate = first[(2 * r + 1) * size + i];
                most = gate > most ? gate : most;
            }
            for (int r = 0; r < ratio; r++) {
                const float weight = exponential(first[(2 * r + 1) * size + i] - most);
                sum += weight;
                value += weight * first[2 * r * size + i];
            }
            out[token * size + i] = narrow(value / sum);
        }
    }
}

/* Index of the largest of `values`, the lowest of equal ones; a NaN is never taken, 0 if there is nothing else. */
static long largest_of(const float *values, long count) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (long i = 0; i < count; i++) most = values[i] > most ? values[i] : most;
    for (long i = 0; i < count; i++)
        if (values[i] == most) return i;
    return 0;
}

/* The `chosen` experts of each row by biased score, in falling order, and their weights. Of equal ones the lower. */
void deepinfer_route(const bf16 *x, long tokens, long hidden, const float *weight, const float *bias, long experts,
                     int chosen, int renormalise, float scale, int64_t *ids, float *weights) {
#pragma omp parallel for schedule(static)
    for (long token = 0; token < tokens; token++) {
        float row[hidden], scores[experts], biased[experts];
        for (long h = 0; h < hidden; h++) row[h] = wide(x[token * hidden + h]);
        for (long e = 0; e < experts; e++) {
            const float *w = weight + e * hidden;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long h = 0; h < hidden; h++) sum += row[h] * w[h];
            scores[e] = sum;
        }
#pragma omp simd
        for (long e = 0; e < experts; e++) {
            scores[e] = sqrtf(softplus(scores[e]));
            biased[e] = scores[e] + bias[e];
        }
        float total = 0;
        for (int k = 0; k < chosen; k++) {
            const long best = largest_of(biased, experts);
            biased[best] = NAN; /* taken; even a bias of -inf leaves distinct experts */
            ids[token * chosen + k] = best;
            total += weights[token * chosen + k] = scores[best];
        }
        const float factor = renormalise && chosen > 1 ? scale / (total + 1e-20f) : scale;
        for (int k = 0; k < chosen; k++) weights[token * chosen + k] *= factor;
    }
}

/* Engram's gated read added to every stream, which may lie in place: streams, out [tokens, n, hidden].
 *
 * memory: [tokens, n + 1, hidden], n keys and the value. query, key: [n, hidden], the two norms' weights.
 */
void deepinfer_engram(const bf16 *streams, const bf16 *memory, const bf16 *query, const bf16 *key, long tokens, int n,
                      long hidden, float eps, bf16 *out) {
#pragma omp parallel for schedule(static)
    for (long token = 0; token < tokens; token++)
        for (int i = 0; i < n; i++) {
            const bf16 *stream = streams + (token * n + i) * hidden, *k = memory + (token * (n + 1) + i) * hidden;
            const bf16 *value = memory + (token * (n + 1) + n) * hidden, *a = query + i * hidden, *b = key + i * hidden;
            float own = 0, other = 0, both = 0;
#pragma omp simd reduction(+ : own, other, both)
            for (long h = 0; h < hidden; h++) {
                const float s = wide(stream[h]), m = wide(k[h]);
                own += s * s;
                other += m * m;
                both += s * (wide(a[h]) * wide(b[h])) * m;
            }
            const float match = both / sqrtf(own / hidden + eps) / sqrtf(other / hidden + eps) / sqrtf(hidden);
            const float size = sqrtf(fabsf(match) < 1e-6f ? 1e-6f : fabsf(match));
            const float gate = 1.0f / (1.0f + exponential(-copysignf(size, match)));
            bf16 *target = out + (token * n + i) * hidden;
#pragma omp simd
            for (long h = 0; h < hidden; h++) target[h] = narrow(wide(stream[h]) + gate * wide(value[h]));
        }
}
