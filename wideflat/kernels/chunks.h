/* Tensors worked through in chunks that start at fixed elements, so that the result does not depend on the number of
 * threads, to the last bit. */
#ifndef WIDEFLAT_CHUNKS_H
#define WIDEFLAT_CHUNKS_H

#include <stdint.h>

#define CHUNK 1024

static inline int64_t chunks_of(int64_t size) { return (size + CHUNK - 1) / CHUNK; }

static inline int64_t all_chunks(int64_t tensors, const int64_t *sizes) {
    int64_t chunks = 0;
    for (int64_t t = 0; t < tensors; t++) chunks += chunks_of(sizes[t]);
    return chunks;
}

/* Where one thread is: `n` elements from `at` on of a tensor, and how many chunks are left. */
typedef struct {
    int64_t tensor, at, n, left;
} Walk;

/* Before the chunk `from` of all chunks of all tensors, to end before `to`. */
static inline Walk walk_of(int64_t from, int64_t to, const int64_t *sizes) {
    Walk walk = {.left = to - from};
    if (walk.left <= 0) return walk;
    for (; from >= chunks_of(sizes[walk.tensor]); walk.tensor++) from -= chunks_of(sizes[walk.tensor]);
    walk.at = (from - 1) * CHUNK;
    return walk;
}

/* Go on to the next chunk, if there is one. */
static inline int next_chunk(Walk *walk, const int64_t *sizes) {
    if (walk->left <= 0) return 0;
    walk->left--;
    for (walk->at += CHUNK; walk->at >= sizes[walk->tensor]; walk->tensor++) walk->at = 0;
    walk->n = sizes[walk->tensor] - walk->at < CHUNK ? sizes[walk->tensor] - walk->at : CHUNK;
    return 1;
}

/* Memory that the work on a chunk is going to need. While numbers are computed for it the processor asks for nothing, and
 * afterwards it waits: so they fetch some of it now and then. More at once would make it wait for that. */
#define LINE 64
#define MOST_ARRAYS 6

typedef struct {
    const char *arrays[MOST_ARRAYS];
    int count;
    int64_t bytes, next; /* of each array, and how many of them have been asked for */
} Ahead;

/* For n numbers of arrays, from so many bytes on behind where they begin. */
static inline Ahead ahead_of(int64_t n, int64_t behind) {
    return (Ahead){.bytes = n * (int64_t)sizeof(REAL) + behind, .next = behind};
}

static inline void look_ahead_at(Ahead *ahead, const void *array) {
    if (array) ahead->arrays[ahead->count++] = array;
}

static inline void fetch(Ahead *ahead, int64_t lines) {
    for (; lines && ahead->next < ahead->bytes; lines--, ahead->next += LINE)
        for (int k = 0; k < ahead->count; k++) __builtin_prefetch(ahead->arrays[k] + ahead->next);
}

#endif
