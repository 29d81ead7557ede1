/* Where rows lie in vLLM's blocks. */
#ifndef DEEPINFER_PAGED_H
#define DEEPINFER_PAGED_H

#include "common.h"

/* A paged array of bfloat16 rows, and one key-value group's block table. */
typedef struct {
    const bf16 *rows;
    int64_t channels;       /* stride of a row */
    const int32_t *table;   /* [requests, table_stride] block numbers */
    int64_t table_stride;
    int64_t block_size;     /* tokens */
    int64_t rows_per_block; /* stride of a block, in rows */
    int64_t ratio;          /* tokens per row */
} paged;

/* Row `index` of a request, counted in rows from its first token. */
static inline const bf16 *paged_row(const paged *p, long request, uint32_t index) {
    const uint32_t position = index * (uint32_t)p->ratio, size = (uint32_t)p->block_size;
    const long block = p->table[request * p->table_stride + position / size];
    return p->rows + (block * p->rows_per_block + position % size / (uint32_t)p->ratio) * p->channels;
}

#endif
