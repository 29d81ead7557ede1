/* A mixture-of-experts layer: each expert's rows through its SwiGLU, blocks of 32 rows at a time. */
#include <stdlib.h>

#include "common.h"

static inline float swiglu(float gate, float up, float limit) {
    if (limit > 0) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : (up < -limit ? -limit : up);
    }
    return gate / (1.0f + exponential(-gate)) * up;
}

typedef struct {
    const bf16 *x, *gate_up, *down;
    const float *weights;
    const int32_t *order; /* picks (token x chosen + place) sorted by expert */
    long hidden, width, chosen;
    float limit;
    float *routed; /* [picks, hidden] */
} layer;

/* Up to BLOCK picks of one expert; `inner` holds [BLOCK, hidden + width] bfloat16, `c` two blocks. */
static void some_rows(const layer *l, long expert, long first, int count, bf16 *inner, float *c) {
    const long hidden = l->hidden, width = l->width;
    bf16 *rows = inner, *middle = inner + BLOCK * hidden;
    for (int r = 0; r < count; r++) {
        const long token = l->order[first + r] / l->chosen;
        memcpy(rows + r * hidden, l->x + token * hidden, hidden * sizeof(bf16));
    }
    const bf16 *weight = l->gate_up + expert * 2 * width * hidden;
    for (long block = 0; block < width / BLOCK; block++) {
        float *gate = c, *up = c + BLOCK * BLOCK;
        block_product(rows, hidden, count, weight + block * BLOCK * hidden, hidden, gate, BLOCK, 0);
        block_product(rows, hidden, count, weight + (width + block * BLOCK) * hidden, hidden, up, BLOCK, 0);
        for (int r = 0; r < count; r++) {
            const float factor = l->weights[l->order[first + r]];
#pragma omp simd
            for (int n = 0; n < BLOCK; n++)
                middle[r * width + block * BLOCK + n] =
                    narrow(swiglu(rounded(gate[r * BLOCK + n]), rounded(up[r * BLOCK + n]), l->limit) * factor);
        }
    }
    weight = l->down + expert * hidden * width;
    for (long block = 0; block < hidden / BLOCK; block++) {
        block_product(middle, width, count, weight + block * BLOCK * width, width, c, BLOCK, 0);
        for (int r = 0; r < count; r++)
            memcpy(l->routed + l->order[first + r] * hidden + block * BLOCK, c + r * BLOCK, BLOCK * sizeof(float));
    }
}

/* Experts of tokens [tokens, hidden], added up in float32 in the order of `ids`' columns.
 *
 * ids, weights: [tokens, chosen]. gate_up: per expert a packed [2 x width, hidden]. down: [hidden, width].
 * Returns 0, or 1 when memory is short.
 */
int deepinfer_experts(const bf16 *x, long tokens, long hidden, const int64_t *ids, const float *weights,
                      long chosen, const bf16 *gate_up, const bf16 *down, long experts, long width, float limit,
                      bf16 *out) {
    const long picks = tokens * chosen;
    float *routed = malloc(picks * hidden * sizeof(float));
    int32_t *order = malloc((picks + 4 * (experts + 1) + 3 * (picks / BLOCK + experts + 1)) * sizeof(int32_t));
    if (!routed || !order) {
        free(routed);
        free(order);
        return 1;
    }
    int32_t *starts = order + picks, *fill = starts + experts + 1, *items = fill + experts + 1;
    memset(starts, 0, (experts + 1) * sizeof(int32_t));
    for (long pick = 0; pick < picks; pick++) starts[ids[pick] + 1]++;
    for (long e = 0; e < experts; e++) starts[e + 1] += starts[e];
    memcpy(fill, starts, experts * sizeof(int32_t));
    for (long pick = 0; pick < picks; pick++) order[fill[ids[pick]]++] = pick;
    long count = 0;
    for (long e = 0; e < experts; e++)
        for (int32_t first = starts[e]; first < starts[e + 1]; first += BLOCK) {
            const int32_t left = starts[e + 1] - first;
            items[3 * count] = e, items[3 * count + 1] = first, items[3 * count + 2] = left < BLOCK ? left : BLOCK;
            count++;
        }
    const layer l = {x, gate_up, down, weights, order, hidden, width, chosen, limit, routed};
    int failed = 0;
#pragma omp parallel
    {
        bf16 *inner = aligned_alloc(64, BLOCK * (hidden + width) * sizeof(bf16));
        float c[2 * BLOCK * BLOCK] __attribute__((aligned(64)));
        if (!inner) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (long item = 0; item < count; item++)
            if (inner) some_rows(&l, items[3 * item], items[3 * item + 1], items[3 * item + 2], inner, c);
        end_products();
        free(inner);
#pragma omp for schedule(static)
        for (long token = 0; token < tokens; token++)
            for (long n = 0; n < hidden; n += BLOCK) {
                float sum[BLOCK] = {0};
                for (long k = 0; k < chosen; k++) {
                    const float *part = routed + (token * chosen + k) * hidden + n;
#pragma omp simd
                    for (int i = 0; i < BLOCK; i++) sum[i] += part[i];
                }
#pragma omp simd
                for (int i = 0; i < BLOCK; i++) out[token * hidden + n + i] = narrow(sum[i]);
            }
    }
    free(routed);
    free(order);
    return failed;
}
