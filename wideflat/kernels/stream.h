/* Gaussian noise as a function of (seed, step, place): that of wideflat/kernels/noise.py, number by number.
 *
 * 16 random bits choose one of 65536 equally likely parts of the normal distribution. They come from PCG64DXSM, a 128-bit
 * congruential generator, which can jump to any place. In the outermost parts further bits, which come from SplitMix64 at
 * the number's own place, choose a finer part: see `tail`.
 *
 * The files of this folder are compiled with REAL = float or double (wideflat/kernels/library.py).
 */
#ifndef WIDEFLAT_STREAM_H
#define WIDEFLAT_STREAM_H

#include "chunks.h"

typedef unsigned __int128 u128;

#define MULTIPLIER 0xda942042e4dd58b5ULL

/* Parts on each side that are cut more finely, how many bits cut them at a time, and how often. */
#define TAIL_PARTS 128
#define TAIL_BITS 4
#define TAIL_LEVELS 12

/* What the noise of one step is made from. */
typedef struct {
    uint64_t origin_high, origin_low, increment_high, increment_low; /* of the generator */
    uint64_t first_high, first_low;                                  /* the word that place 0 of this step uses */
    const float *quantiles; /* the upper half of the table: the other one has opposite signs */
    uint64_t tail_key;      /* of SplitMix64 for this step */
    const float *tails;     /* TAIL_LEVELS tables of TAIL_PARTS << TAIL_BITS numbers, the largest first */
} NoiseStream;

/* What a state is multiplied with, and what is added to it, to jump that many words. */
static inline void jump_of(u128 increment, u128 distance, u128 *factor, u128 *added) {
    u128 multiplier = MULTIPLIER;
    *factor = 1;
    *added = 0;
    for (; distance; distance >>= 1) {
        if (distance & 1) {
            *factor *= multiplier;
            *added = *added * multiplier + increment;
        }
        increment *= multiplier + 1;
        multiplier *= multiplier;
    }
}

static inline uint64_t word_of(u128 state) {
    uint64_t high = state >> 64, low = (uint64_t)state | 1;
    high ^= high >> 32;
    high *= MULTIPLIER;
    high ^= high >> 48;
    return high * low;
}

static inline int is_outermost(uint16_t bits) { return (uint16_t)(bits + TAIL_PARTS) < 2 * TAIL_PARTS; }

/* The number of an outermost part. Parts are counted from the outside; as long as it is one of the first TAIL_PARTS, it is
 * cut into 2^TAIL_BITS. So the parts are small against what lies beyond them, however far out. */
static __attribute__((noinline)) float tail(const NoiseStream *stream, uint64_t place, uint16_t bits) {
    uint64_t more = stream->tail_key + (place + 1) * 0x9e3779b97f4a7c15ULL; /* SplitMix64 */
    more = (more ^ more >> 30) * 0xbf58476d1ce4e5b9ULL;
    more = (more ^ more >> 27) * 0x94d049bb133111ebULL;
    more ^= more >> 31;
    const int upper = bits >> 15;
    const float *table = stream->tails;
    uint32_t part = upper ? 65535 - bits : bits;
    for (int level = 0;; level++, more >>= TAIL_BITS, table += TAIL_PARTS << TAIL_BITS) {
        part = part << TAIL_BITS | (more & ((1 << TAIL_BITS) - 1));
        if (part >= TAIL_PARTS || level == TAIL_LEVELS - 1) return upper ? table[part] : -table[part];
    }
}

#endif
