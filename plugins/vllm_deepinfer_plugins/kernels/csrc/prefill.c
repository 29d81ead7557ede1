/* Attention of a prompt chunk: its rows share their keys, so window and entries are packed once and masked.
 *
 * A strip of rows (token, head) walks over groups of key blocks with a running maximum (online softmax); scores and
 * sums stay in float32, the weights of a group are rounded to bfloat16 for the second product. Where groups begin
 * depends on the chunk, so a row's last bits do too; the number of threads changes nothing.
 */
#include <math.h>
#include <stdlib.h>

#include "paged.h"
#include "vectors.h"

enum { GROUP = 8, STRIP = 128 }; /* key blocks that a strip of rows passes at once; both fit the second-level cache */

typedef struct {
    const bf16 *query;
    long tokens, size, begin, reach, near_first, near_count, near_blocks, entry_count, k, all_keys;
    int heads;
    const int64_t *chosen;
    const float *sink;
    float scale;
    const bf16 *keys, *values; /* packed: [all_keys, size] and its transpose */
    bf16 *out;
} span;

/* Which of 32 neighbouring keys lie in [first, last), both counted from the first of them. */
static inline uint32_t between(long first, long last) {
    const uint32_t below = last >= 32 ? 0xffffffffu : (last <= 0 ? 0 : (1u << last) - 1);
    const uint32_t under = first >= 32 ? 0xffffffffu : (first <= 0 ? 0 : (1u << first) - 1);
    return below & ~under;
}

/* Keys into block products' layout: as a weight [all_keys, size] for scores, as its transpose for sums. */
static void pack_key(const bf16 *row, long n, long size, long all_keys, bf16 *keys, bf16 *values) {
    bf16 *key = keys + n / BLOCK * BLOCK * size + n % BLOCK * 2;
    for (long i = 0; i < size; i += 2) {
        uint32_t pair = 0;
        if (row) memcpy(&pair, row + i, sizeof pair);
        memcpy(key + i * BLOCK, &pair, sizeof pair);
    }
    for (long i = 0; i < size; i += BLOCK) {
        bf16 *value = values + i * all_keys + n / 2 * 2 * BLOCK + n % 2;
        for (long j = 0; j < BLOCK; j++) value[2 * j] = row ? row[i + j] : 0;
    }
}

/* Which keys the tokens of a strip see: masks [tokens, key blocks], a bit per key. */
static void fill_masks(const span *a, long token0, long token1, uint32_t *masks) {
    const long blocks = a->all_keys / BLOCK;
    memset(masks, 0, (token1 - token0 + 1) * blocks * sizeof *masks);
    for (long token = token0; token <= token1; token++) {
        uint32_t *mask = masks + (token - token0) * blocks;
        const long last = a->begin + token + 1 - a->near_first, start = last - a->reach;
        for (long b = start > 0 ? start / BLOCK : 0; b * BLOCK < last; b++)
            mask[b] = between(start - b * BLOCK, last - b * BLOCK);
        mask += a->near_blocks;
        for (long i = 0; i < a->k; i++) {
            const int64_t e = a->chosen[token * a->k + i];
            if (e >= 0) mask[e / BLOCK] |= 1u << e % BLOCK;
        }
    }
}

/* Sixteen scaled scores, -inf where the bit of the key is not set. */
static inline lanes masked(const float *scores, float scale, uint32_t bits) {
    const lane_bits each = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    const lane_bits seen = (lane_bits)((each & bits) != 0), none = (lane_bits){0} + 0xff800000u;
    return (lanes)((seen & (lane_bits)(load(scores) * scale)) | (~seen & none));
}

/* One row's scores of a group to weights, relative to the row's running maximum; o is faded when that grows. */
static void weigh(const span *a, float *scores, const uint32_t *mask, int count, float *most, float *total,
                  bf16 *weights, float *o) {
    float values[LANES], top = *most, sum = 0;
    lanes largest = (lanes){0} + top;
    for (int n = 0; n < count * BLOCK; n += LANES) {
        const lanes value = masked(scores + n, a->scale, mask[n / BLOCK] >> n % BLOCK & 0xffff);
        memcpy(scores + n, &value, sizeof value);
        largest = larger(value, largest);
    }
    memcpy(values, &largest, sizeof values);
    for (int n = 0; n < LANES; n++) top = values[n] > top ? values[n] : top;
    const float base = top == -INFINITY ? 0 : top;
#pragma omp simd reduction(+ : sum)
    for (int n = 0; n < count * BLOCK; n++) {
        const float weight = exponential(scores[n] - base);
        weights[n] = narrow(weight);
        sum += weight;
    }
    if (top > *most) {
        const float fade = exponential(*most - base);
        *total *= fade;
        *most = top;
#pragma omp simd
        for (long i = 0; i < a->size; i++) o[i] *= fade;
    }
    *total += sum;
}

/* A strip of rows (token, head). scratch: s, p [BLOCK, GROUP x BLOCK]; o [STRIP, size]; masks of the tokens. */
static void some_rows(const span *a, long first, int rows, uint32_t *masks, float *s, bf16 *p, float *o) {
    const long blocks = a->all_keys / BLOCK, token0 = first / a->heads, token1 = (first + rows - 1) / a->heads;
    fill_masks(a, token0, token1, masks);
    float most[STRIP], sums[STRIP];
    for (int r = 0; r < rows; r++) most[r] = -INFINITY, sums[r] = 0;
    memset(o, 0, rows * a->size * sizeof(float));
    for (long b = 0; b < blocks;) {
        uint32_t any = 0;
        for (long t = 0; t <= token1 - token0; t++) any |= masks[t * blocks + b];
        if (!any) {
            b++;
            continue;
        }
        const int count = blocks - b < GROUP ? blocks - b : GROUP;
        for (int row = 0; row < rows; row += BLOCK) {
            const int some = rows - row < BLOCK ? rows - row : BLOCK;
            for (int i = 0; i < count; i++)
                block_product(a->query + (first + row) * a->size, a->size, some, a->keys + (b + i) * BLOCK * a->size,
                              a->size, s + i * BLOCK, GROUP * BLOCK, 0);
            for (int r = 0; r < some; r++)
                weigh(a, s + r * GROUP * BLOCK, masks + ((first + row + r) / a->heads - token0) * blocks + b, count,
                      most + row + r, sums + row + r, p + r * GROUP * BLOCK, o + (row + r) * a->size);
            for (long i = 0; i < a->size; i += BLOCK)
                block_product(p, GROUP * BLOCK, some, a->values + i * a->all_keys + b * BLOCK * BLOCK, count * BLOCK,
                              o + row * a->size + i, a->size, 1);
        }
        b += count;
    }
    for (int r = 0; r < rows; r++) {
        const float sink = a->sink[(first + r) % a->heads], base = sink > most[r] ? sink : most[r];
        const float fade = exponential(most[r] - base), factor = fade / (sums[r] * fade + exponential(sink - base));
        bf16 *target = a->out + (first + r) * a->size;
        const float *source = o + r * a->size;
#pragma omp simd
        for (long i = 0; i < a->size; i++) target[i] = narrow(source[i] * factor);
    }
}

/* Softmax attention with a sink of a chunk's rows over window and chosen entries.
 *
 * query, out: [tokens, heads, size], size a multiple of 32. Rows stand at positions `begin` and following of one
 * request and see no window key in front of `floor`. chosen: [tokens, k] entry numbers, -1 for none; entries may be
 * NULL. Returns 0, or 1 without memory.
 */
int deepinfer_attend_span(const bf16 *query, long tokens, int heads, long size, long begin, long request,
                          long floor, const paged *window, long reach, const paged *entries, const int64_t *chosen, long k,
                          const float *sink, float scale, bf16 *out) {
    span a = {.query = query, .tokens = tokens, .size = size, .begin = begin, .reach = reach, .heads = heads,
              .chosen = chosen, .k = k, .sink = sink, .scale = scale, .out = out};
    a.near_first = begin - reach + 1 > floor ? begin - reach + 1 : floor;
    a.near_count = begin + tokens - a.near_first;
    a.near_blocks = (a.near_count + BLOCK - 1) / BLOCK;
    a.entry_count = entries ? (begin + tokens) / entries->ratio : 0;
    const long blocks = a.near_blocks + (a.entry_count + BLOCK - 1) / BLOCK;
    a.all_keys = blocks * BLOCK;
    bf16 *keys = aligned_alloc(64, 2 * a.all_keys * size * sizeof(bf16));
    if (!keys) return 1;
    bf16 *values = keys + a.all_keys * size;
    a.keys = keys, a.values = values;
    int failed = 0;
#pragma omp parallel
    {
        const long scratch = BLOCK * GROUP * BLOCK * (sizeof(float) + sizeof(bf16)) + STRIP * size * sizeof(float);
        char *memory = aligned_alloc(64, (scratch + (STRIP + 1) * blocks * sizeof(uint32_t) + 63) / 64 * 64);
        float *s = (float *)memory, *o = s + BLOCK * GROUP * BLOCK;
        bf16 *p = (bf16 *)(o + STRIP * size);
        uint32_t *masks = (uint32_t *)(p + BLOCK * GROUP * BLOCK);
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (long pair = 0; pair < a.all_keys / 2; pair++)
            for (long n = 2 * pair; n < 2 * pair + 2; n++) {
                const long e = n - a.near_blocks * BLOCK;
                const bf16 *row = 0;
                if (n < a.near_count) row = paged_row(window, request, a.near_first + n);
                if (e >= 0 && e < a.entry_count) row = paged_row(entries, request, e);
                pack_key(row, n, size, a.all_keys, keys, values);
            }
#pragma omp for schedule(dynamic)
        for (long first = 0; first < tokens * heads; first += STRIP)
            if (memory)
                some_rows(&a, first, tokens * heads - first < STRIP ? tokens * heads - first : STRIP, masks, s, p, o);
        end_products();
        free(memory);
    }
    free(keys);
    return failed;
}
