/* Attention of single rows: each has its own keys, read where they lie. The keys are the values. */
#include <math.h>
#include <stdlib.h>

#include "paged.h"
#include "vectors.h"

enum { TOGETHER = 4, CHUNK = 4 }; /* heads that share a pass over the keys; vectors of a pass over the values */

/* The weighted sums of `vectors` (CHUNK or 1) x LANES channels from `first`. */
static inline __attribute__((always_inline)) void some_values(const bf16 *const *keys, long count, long first,
                                                              int vectors, int heads, long size, const float *logits,
                                                              const float *factors, bf16 *out) {
    lanes sums[TOGETHER][CHUNK] = {0};
    for (long key = 0; key < count; key++) {
        lanes value[CHUNK];
        for (int v = 0; v < vectors; v++) value[v] = load_wide(keys[key] + first + v * LANES);
        for (int h = 0; h < heads; h++) {
            const float weight = logits[h * count + key];
            for (int v = 0; v < vectors; v++) sums[h][v] += value[v] * weight;
        }
    }
    for (int h = 0; h < heads; h++) {
        float values[CHUNK * LANES];
        memcpy(values, sums[h], sizeof values);
        for (int i = 0; i < vectors * LANES; i++) out[h * size + first + i] = narrow(values[i] * factors[h]);
    }
}

/* `heads` (TOGETHER or 1) heads of one row over `count` keys. logits: [heads, count]; size a multiple of 16. */
static inline __attribute__((always_inline)) void some_heads(const bf16 *const *keys, long count, const bf16 *query,
                                                             int heads, long size, const float *sink, float scale,
                                                             float *q, float *logits, bf16 *out) {
    for (long i = 0; i < heads * size; i++) q[i] = wide(query[i]) * scale;
    for (long key = 0; key < count; key++) {
        lanes sums[TOGETHER] = {0};
        for (long i = 0; i < size; i += LANES) {
            const lanes value = load_wide(keys[key] + i);
            for (int h = 0; h < heads; h++) sums[h] += value * load(q + h * size + i);
        }
        for (int h = 0; h < heads; h++) logits[h * count + key] = sum_of(sums[h]);
    }
    float factors[TOGETHER];
    for (int h = 0; h < heads; h++) {
        float *row = logits + h * count, most = sink[h], sum = 0;
#pragma omp simd reduction(max : most)
        for (long key = 0; key < count; key++) most = row[key] > most ? row[key] : most;
#pragma omp simd reduction(+ : sum)
        for (long key = 0; key < count; key++) sum += row[key] = exponential(row[key] - most);
        factors[h] = 1.0f / (sum + exponential(sink[h] - most));
    }
    long first = 0;
    for (; first + CHUNK * LANES <= size; first += CHUNK * LANES)
        some_values(keys, count, first, CHUNK, heads, size, logits, factors, out);
    for (; first < size; first += LANES) some_values(keys, count, first, 1, heads, size, logits, factors, out);
}

/* Softmax attention with a sink over the last `reach` window rows and the chosen entries of each row.
 *
 * query, out: [tokens, heads, size], size a multiple of 16. chosen: [tokens, k] entry numbers, -1 for none, or k = 0.
 * floors: [tokens], the first position whose window key a row may see, or NULL for all.
 * Returns 0, or 1 when memory is short.
 */
int deepinfer_attend_rows(const bf16 *query, long tokens, int heads, long size, const int64_t *positions,
                          const int64_t *requests, const int64_t *floors, const paged *window, long reach,
                          const paged *entries, const int64_t *chosen, long k, const float *sink, float scale,
                          bf16 *out) {
    const int groups = heads / TOGETHER + heads % TOGETHER;
    int failed = 0;
#pragma omp parallel
    {
        const bf16 **keys = malloc((reach + k) * sizeof *keys);
        float *logits = malloc(TOGETHER * (reach + k) * sizeof(float));
        float q[TOGETHER * size];
        if (!keys || !logits) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static) collapse(2)
        for (long token = 0; token < tokens; token++)
            for (int group = 0; group < groups; group++) {
                if (!keys || !logits) continue;
                long count = 0;
                const long position = positions[token], request = requests[token];
                const long floor = floors && floors[token] > 0 ? floors[token] : 0;
                for (long p = position - reach + 1 > floor ? position - reach + 1 : floor; p <= position; p++)
                    keys[count++] = paged_row(window, request, p);
                for (long i = 0; i < k; i++)
                    if (chosen[token * k + i] >= 0) keys[count++] = paged_row(entries, request, chosen[token * k + i]);
                const int whole = heads / TOGETHER;
                const int head = group < whole ? group * TOGETHER : whole * TOGETHER + group - whole;
                const long at = (token * heads + head) * size;
                if (group < whole)
                    some_heads(keys, count, query + at, TOGETHER, size, sink + head, scale, q, logits, out + at);
                else
                    some_heads(keys, count, query + at, 1, size, sink + head, scale, q, logits, out + at);
            }
        free(keys);
        free(logits);
    }
    return failed;
}
