/* Products with packed weights: the 32 x 32 block by AMX, or by C that the compiler vectorises. */
#include "common.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Linux grants a process the tile registers when it asks: ARCH_REQ_XCOMP_PERM for XTILEDATA. 0 when granted. */
int deepinfer_prepare(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) tile_config;

static _Thread_local int configured;

void begin_products(int rows) {
    if (rows == configured) return;
    int first = rows < 16 ? rows : 16, second = rows - first;
    tile_config config = {.palette = 1};
    const int shape[8] = {first, second, 16, 16, first, first, second, second};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = shape[tile];
        config.bytes[tile] = shape[tile] ? 64 : 0;
    }
    /* GCC's intrinsics do not say what memory they read: without the barrier it drops the stores above. */
    const tile_config *written = &config;
    __asm__ volatile("" : "+r"(written) : : "memory");
    _tile_loadconfig(written);
    configured = rows;
}

/* Other libraries use the tiles between our calls, so a configuration never outlives one. */
void end_products(void) {
    _tile_release();
    configured = 0;
}

void block_product(const bf16 *a, long stride, int rows, const bf16 *packed, long inputs, float *c, long c_stride,
                   int accumulate) {
    begin_products(rows);
    __asm__ volatile("" : : : "memory");
    const long a_bytes = stride * 2, c_bytes = c_stride * 4;
    if (accumulate) {
        _tile_loadd(4, c, c_bytes);
        _tile_loadd(5, c + 16, c_bytes);
    } else {
        _tile_zero(4);
        _tile_zero(5);
    }
    if (rows <= 16) {
        for (long k = 0; k < inputs; k += 32) {
            const bf16 *b = packed + k * BLOCK;
            _tile_loadd(0, a + k, a_bytes);
            _tile_loadd(2, b, 128);
            _tile_loadd(3, b + 32, 128);
            _tile_dpbf16ps(4, 0, 2);
            _tile_dpbf16ps(5, 0, 3);
        }
    } else {
        if (accumulate) {
            _tile_loadd(6, c + 16 * c_stride, c_bytes);
            _tile_loadd(7, c + 16 * c_stride + 16, c_bytes);
        } else {
            _tile_zero(6);
            _tile_zero(7);
        }
        for (long k = 0; k < inputs; k += 32) {
            const bf16 *b = packed + k * BLOCK;
            _tile_loadd(0, a + k, a_bytes);
            _tile_loadd(1, a + 16 * stride + k, a_bytes);
            _tile_loadd(2, b, 128);
            _tile_loadd(3, b + 32, 128);
            _tile_dpbf16ps(4, 0, 2);
            _tile_dpbf16ps(5, 0, 3);
            _tile_dpbf16ps(6, 1, 2);
            _tile_dpbf16ps(7, 1, 3);
        }
        _tile_stored(6, c + 16 * c_stride, c_bytes);
        _tile_stored(7, c + 16 * c_stride + 16, c_bytes);
    }
    _tile_stored(4, c, c_bytes);
    _tile_stored(5, c + 16, c_bytes);
}

#else

int deepinfer_prepare(void) { return 0; }

void begin_products(int rows) { (void)rows; }
void end_products(void) {}

void block_product(const bf16 *a, long stride, int rows, const bf16 *packed, long inputs, float *c, long c_stride,
                   int accumulate) {
    for (int row = 0; row < rows; row++) {
        float sums[BLOCK] = {0};
        const bf16 *left = a + row * stride;
        for (long k = 0; k < inputs; k += 2) {
            const float even = wide(left[k]), odd = wide(left[k + 1]);
            const bf16 *right = packed + k * BLOCK;
#pragma omp simd
            for (int n = 0; n < BLOCK; n++) {
                uint32_t pair;
                memcpy(&pair, right + 2 * n, sizeof pair);
                sums[n] += even * wide((bf16)pair) + odd * wide((bf16)(pair >> 16));
            }
        }
        float *target = c + row * c_stride;
        for (int n = 0; n < BLOCK; n++) target[n] = accumulate ? target[n] + sums[n] : sums[n];
    }
}

#endif

/* Rows times a packed weight: [rows, outputs] in bfloat16, or in float32 if `wide_out` is set.
 *
 * x: [rows, groups x inputs] at a stride; the weight is block diagonal: outputs / groups of them see a group.
 */
void deepinfer_linear(const bf16 *x, long x_stride, long rows, long inputs, long groups, const bf16 *packed,
                      long outputs, void *out, int wide_out) {
    enum { ROWS = 256 }; /* of x that stay in the second-level cache while all weights pass */
    const long chunks = (rows + ROWS - 1) / ROWS, blocks = outputs / BLOCK, per_group = blocks / groups;
#pragma omp parallel
    {
        float c[BLOCK * BLOCK] __attribute__((aligned(64)));
#pragma omp for schedule(static) collapse(2)
        for (long chunk = 0; chunk < chunks; chunk++)
            for (long block = 0; block < blocks; block++) {
                const long last = (chunk + 1) * ROWS < rows ? (chunk + 1) * ROWS : rows;
                const bf16 *part = x + block / per_group * inputs;
                for (long row = chunk * ROWS; row < last; row += BLOCK) {
                    const int count = last - row < BLOCK ? last - row : BLOCK;
                    block_product(part + row * x_stride, x_stride, count, packed + block * BLOCK * inputs, inputs,
                                  c, BLOCK, 0);
                    for (int r = 0; r < count; r++) {
                        const long at = (row + r) * outputs + block * BLOCK;
                        if (wide_out) {
                            memcpy((float *)out + at, c + r * BLOCK, BLOCK * sizeof(float));
                        } else {
#pragma omp simd
                            for (int n = 0; n < BLOCK; n++) ((bf16 *)out)[at + n] = narrow(c[r * BLOCK + n]);
                        }
                    }
                }
            }
        end_products();
    }
}
