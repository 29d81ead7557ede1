/* Sixteen float lanes, in the compiler's own vector types: it cuts them to what the processor has. */
#ifndef DEEPINFER_VECTORS_H
#define DEEPINFER_VECTORS_H

#include "common.h"

enum { LANES = 16 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t lane_bits __attribute__((vector_size(4 * LANES)));
typedef bf16 halves __attribute__((vector_size(2 * LANES)));

static inline lanes load_wide(const bf16 *values) {
    halves packed;
    memcpy(&packed, values, sizeof packed);
    return (lanes)(__builtin_convertvector(packed, lane_bits) << 16);
}

static inline lanes load(const float *values) {
    lanes result;
    memcpy(&result, values, sizeof result);
    return result;
}

static inline lanes larger(lanes a, lanes b) {
    const lane_bits first = (lane_bits)(a > b);
    return (lanes)((first & (lane_bits)a) | (~first & (lane_bits)b));
}

/* Lanes in another order: GCC 11 has only the older of the two built-ins, clang only the newer. */
#ifdef __clang__
#define SHUFFLED(values, ...) __builtin_shufflevector(values, values, __VA_ARGS__)
#else
#define SHUFFLED(values, ...) __builtin_shuffle(values, (lane_bits){__VA_ARGS__})
#endif

/* The sum of all lanes, halves first. */
static inline float sum_of(lanes values) {
    const lanes a = values + SHUFFLED(values, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    const lanes b = a + SHUFFLED(a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    const lanes c = b + SHUFFLED(b, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return c[0] + c[1];
}

#endif
