/* The indexer: scores of entries, and the best of them. Of equal scores the lower position is taken. */
#include <math.h>
#include <stdlib.h>

#include "paged.h"
#include "vectors.h"

enum { BINS = 2048, PIECE = 128 };

/* An unsigned integer in the order of the floats (-0 as 0). */
static inline uint32_t ordered(float value) {
    uint32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

/* From bin counts: the bin with the k-th largest, and how many of it are wanted. */
static uint32_t bin_of(const int32_t *counts, int bins, long *k) {
    long above = 0;
    for (int bin = bins - 1; bin > 0; bin--) {
        if (above + counts[bin] >= *k) {
            *k -= above;
            return bin;
        }
        above += counts[bin];
    }
    *k -= above;
    return 0;
}

/* Positions of the k largest of `values` [count], increasing, then -1. Those that are -inf are never taken.
 * keys: scratch [count]. */
static void best(const float *values, long count, long k, uint32_t *keys, int64_t *positions) {
    const uint32_t lowest = ordered(-INFINITY);
    long filled = 0;
    for (long i = 0; i < count; i++) keys[i] = ordered(values[i]);
    if (count <= k) {
        for (long i = 0; i < count; i++)
            if (keys[i] > lowest) positions[filled++] = i;
    } else {
        int32_t counts[BINS] = {0};
        long wanted = k;
        for (long i = 0; i < count; i++) counts[keys[i] >> 21]++;
        uint32_t prefix = bin_of(counts, BINS, &wanted) << 21;
        memset(counts, 0, sizeof counts);
        for (long i = 0; i < count; i++)
            if ((keys[i] & 0xffe00000) == prefix) counts[keys[i] >> 10 & 0x7ff]++;
        prefix |= bin_of(counts, BINS, &wanted) << 10;
        memset(counts, 0, sizeof counts);
        for (long i = 0; i < count; i++)
            if ((keys[i] & 0xfffffc00) == prefix) counts[keys[i] & 0x3ff]++;
        const uint32_t level = prefix | bin_of(counts, 1024, &wanted);
        for (long i = 0; i < count; i++) {
            if (keys[i] <= lowest || keys[i] < level || (keys[i] == level && wanted == 0)) continue;
            wanted -= keys[i] == level;
            positions[filled++] = i;
        }
    }
    while (filled < k) positions[filled++] = -1;
}

/* The two-level filter of candidate blocks; blocks: [count] numbers, -1 for none, or NULL for no filter. */
typedef struct {
    int64_t *blocks;
    int64_t count, size;
    int64_t source; /* 1: this layer fills `blocks`; 0: it keeps inside them */
} candidates;

/* Filter one row of scores [visible] and take its k best. scratch: [2 x visible] words. */
static void choose(float *scores, long visible, const candidates *c, long row, long k, uint32_t *scratch,
                   int64_t *chosen) {
    if (c->blocks) {
        const long blocks = (visible + c->size - 1) / c->size;
        float *most = (float *)scratch + visible;
        int64_t *numbers = c->blocks + row * c->count;
        if (c->source) {
            for (long b = 0; b < blocks; b++) {
                const long last = (b + 1) * c->size < visible ? (b + 1) * c->size : visible;
                most[b] = -INFINITY;
                for (long i = b * c->size; i < last; i++) most[b] = scores[i] > most[b] ? scores[i] : most[b];
            }
            if (blocks) most[blocks - 1] = INFINITY;
            best(most, blocks, c->count, scratch, numbers);
        } else {
            for (long b = 0; b < blocks; b++) most[b] = 0;
            for (long i = 0; i < c->count; i++)
                if (numbers[i] >= 0 && numbers[i] < blocks) most[numbers[i]] = 1;
            for (long i = 0; i < visible; i++)
                if (most[i / c->size] == 0) scores[i] = -INFINITY;
        }
    }
    best(scores, visible, k, scratch, chosen);
}

/* Scores of some entries for one row: the sum over heads of weight x relu(query . key). size a multiple of 16. */
static void score(const bf16 *query, const float *weights, int heads, long size, const paged *entries, long offset,
                  long request, long first, long last, float *scores) {
    float q[heads * size];
    for (long i = 0; i < heads * size; i++) q[i] = wide(query[i]);
    for (long e = first; e < last; e++) {
        const bf16 *key = paged_row(entries, request, e) + offset;
        float total = 0;
        for (int h = 0; h < heads; h++) {
            lanes sum = {0};
            for (long i = 0; i < size; i += LANES) sum += load_wide(key + i) * load(q + h * size + i);
            const float product = sum_of(sum);
            total += weights[h] * (product > 0 ? product : 0);
        }
        scores[e] = total;
    }
}

/* Choose k entries for rows of several requests.
 *
 * query: [tokens, heads, size]; weights: [tokens, heads]; visible: [tokens] entries a row may see; index keys lie
 * `offset` elements behind the start of an entry. chosen: [tokens, k]. Returns 0, or 1 when memory is short.
 */
int deepinfer_select_rows(const bf16 *query, const float *weights, long tokens, int heads, long size,
                          const int64_t *requests, const int64_t *visible, const paged *entries, long offset,
                          const candidates *filter, long k, int64_t *chosen) {
    long widest = 1;
    for (long t = 0; t < tokens; t++) widest = visible[t] > widest ? visible[t] : widest;
    float *scores = malloc(tokens * widest * sizeof(float));
    uint32_t *scratch = malloc(2 * tokens * widest * sizeof(uint32_t));
    if (!scores || !scratch) {
        free(scores);
        free(scratch);
        return 1;
    }
    const long pieces = (widest + PIECE - 1) / PIECE;
#pragma omp parallel
    {
#pragma omp for schedule(static) collapse(2)
        for (long t = 0; t < tokens; t++)
            for (long piece = 0; piece < pieces; piece++) {
                const long last = (piece + 1) * PIECE < visible[t] ? (piece + 1) * PIECE : visible[t];
                score(query + t * heads * size, weights + t * heads, heads, size, entries, offset, requests[t],
                      piece * PIECE, last, scores + t * widest);
            }
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++)
            choose(scores + t * widest, visible[t], filter, t, k, scratch + 2 * t * widest, chosen + t * k);
    }
    free(scores);
    free(scratch);
    return 0;
}

/* Scores of BLOCK entries = (or +=) the sum of weight x relu(product) over some heads' products [heads, BLOCK]. */
static void add_heads(const float *products, const float *weights, int heads, int accumulate, float *scores) {
    float sums[BLOCK] = {0};
    if (accumulate) memcpy(sums, scores, sizeof sums);
    for (int h = 0; h < heads; h++) {
        const float weight = weights[h], *row = products + h * BLOCK;
#pragma omp simd
        for (int n = 0; n < BLOCK; n++) sums[n] += weight * (row[n] > 0 ? row[n] : 0);
    }
    memcpy(scores, sums, sizeof sums);
}

/* Choose k entries for each row of a prompt chunk of one request, positions `begin` and following.
 *
 * As `deepinfer_select_rows`; size a multiple of 32.
 */
int deepinfer_select_span(const bf16 *query, const float *weights, long tokens, int heads, long size, long begin,
                          long request, const paged *entries, long offset, const candidates *filter, long k,
                          int64_t *chosen) {
    const long width = (begin + tokens) / entries->ratio, blocks = (width + BLOCK - 1) / BLOCK;
    const long together = heads < BLOCK ? BLOCK / heads : 1, padded = (blocks ? blocks : 1) * BLOCK;
    bf16 *packed = aligned_alloc(64, padded * size * sizeof(bf16));
    if (!packed) return 1;
    int failed = 0;
#pragma omp parallel
    {
        float *scores = malloc(together * padded * sizeof(float));
        uint32_t *scratch = malloc(2 * padded * sizeof(uint32_t));
        float c[BLOCK * BLOCK] __attribute__((aligned(64)));
        if (!scores || !scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (long b = 0; b < blocks; b++)
            for (long n = 0; n < BLOCK; n++) {
                const long e = b * BLOCK + n;
                const bf16 *key = e < width ? paged_row(entries, request, e) + offset : 0;
                for (long i = 0; i < size; i += 2)
                    for (int j = 0; j < 2; j++)
                        packed[b * BLOCK * size + i * BLOCK + 2 * n + j] = key ? key[i + j] : 0;
            }
#pragma omp for schedule(dynamic)
        for (long first = 0; first < tokens; first += together) {
            if (!scores || !scratch) continue;
            const long count = tokens - first < together ? tokens - first : together;
            const long most = (begin + first + count) / entries->ratio;
            for (long b = 0; b * BLOCK < most; b++)
                for (int from = 0; from < heads; from += BLOCK) {
                    const int some = heads - from < BLOCK ? heads - from : BLOCK;
                    block_product(query + (first * heads + from) * size, size, count * some, packed + b * BLOCK * size,
                                  size, c, BLOCK, 0);
                    for (long t = 0; t < count; t++)
                        add_heads(c + t * some * BLOCK, weights + (first + t) * heads + from, some, from > 0,
                                  scores + t * padded + b * BLOCK);
                }
            for (long t = 0; t < count; t++)
                choose(scores + t * padded, (begin + first + t + 1) / entries->ratio, filter, first + t, k, scratch,
                       chosen + (first + t) * k);
        }
        end_products();
        free(scores);
        free(scratch);
    }
    free(packed);
    return failed;
}
