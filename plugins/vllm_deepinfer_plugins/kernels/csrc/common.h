/* What all kernels share: bfloat16, the packed weight layout, the block product.
 *
 * Every function works on rows, and a row's bits depend on that row alone: sums run in one fixed order whatever
 * the number of rows. (Not so in prefill.c: there the chunk decides which keys share a rounding.) Threads come from the OpenMP runtime that PyTorch has loaded.
 */
#ifndef DEEPINFER_COMMON_H
#define DEEPINFER_COMMON_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

/* Rows and columns of a block product. A weight [outputs, inputs] is packed in blocks of BLOCK outputs:
 * [outputs / BLOCK][inputs / 2][BLOCK][2], the operand that AMX tiles and AVX-512's bfloat16 products take. */
enum { BLOCK = 32 };

static inline float wide(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Round to nearest, ties to even; a NaN stays one. */
static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bf16)rounded;
}

static inline float rounded(float value) { return wide(narrow(value)); }

/* The nearest integer of a value below 2^22, ties to even. */
static inline float nearest(float value) {
    const float magic = 12582912.0f;
    return (value + magic) - magic;
}

/* e^x to about 2 units in the last place; below -87 it is 0 (so is e^-inf), above 88 it is e^88. */
static inline float exponential(float x) {
    float safe = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = nearest(safe * 1.44269504f);
    float r = safe - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

/* The natural logarithm of a positive normal float to about 1 unit in the last place (Cephes' polynomial). */
static inline float logarithm(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    /* x = m * 2^e with m in [sqrt(1/2), sqrt(2)) */
    const int32_t e = ((int32_t)bits - 0x3f3504f3) >> 23;
    bits -= (uint32_t)e << 23;
    float m;
    memcpy(&m, &bits, sizeof m);
    const float r = m - 1.0f, n = (float)e;
    float p = 7.0376836292e-2f;
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    return r - 0.5f * r * r + r * r * r * p - 2.12194440e-4f * n + 0.693359375f * n;
}

/* log(1 + e^x), x itself above 20 (as in PyTorch), so is a NaN. */
static inline float softplus(float x) {
    const float e = exponential(x);
    const float small = e - e * e * (0.5f - e * (1.0f / 3));
    return !(x <= 20.0f) ? x : (e < 1e-2f ? small : logarithm(1.0f + e));
}

/* Tell the calling thread's tile unit about products of `rows` rows (1 to BLOCK); a no-op without AMX. */
void begin_products(int rows);
void end_products(void);

/* c[rows][BLOCK] = (or +=) a[rows][inputs] x one packed block; strides in elements, inputs a multiple of 32. */
void block_product(const bf16 *a, long stride, int rows, const bf16 *packed, long inputs, float *c, long c_stride,
                   int accumulate);

#endif
