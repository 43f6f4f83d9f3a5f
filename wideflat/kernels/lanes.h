/* A block of numbers at a time where the processor has AVX-512: sixteen words side by side. A block is so small that the
 * processor looks its numbers up while it still works with those before. The same words and numbers as without. */
#ifndef WIDEFLAT_LANES_H
#define WIDEFLAT_LANES_H

#include "stream.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#include <immintrin.h>

#define BLOCK 64
#define LANES 16
/* How far before its use memory is fetched, in bytes: by measurement. */
#define BEFOREHAND 1536
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Eight states, the halves of each apart, and how a state goes on: s <- factor s + added. */
typedef struct {
    __m512i low, high;
} Eight;

typedef struct {
    Eight factor, added;
} Jumps;

/* Sixteen states in a row, how each gets to the one sixteen further, and how one becomes sixteen. */
typedef struct {
    Eight states[2];
    Jumps further, apart[2];
    int64_t next; /* the word that the first state gives; -1: they have not been set */
} Lanes;

/* In 128 bits, of which the compiler has no vectors: products of halves of 32 bits. */
ALWAYS_INLINE Eight after(Eight s, const Jumps *by) {
    const Eight f = by->factor, a = by->added;
    const __m512i ones = _mm512_set1_epi64(0xffffffff);
    const __m512i s1 = _mm512_srli_epi64(s.low, 32), f1 = _mm512_srli_epi64(f.low, 32);
    const __m512i below = _mm512_srli_epi64(_mm512_mul_epu32(s.low, f.low), 32);
    const __m512i cross = _mm512_add_epi64(_mm512_mul_epu32(s1, f.low), below);
    const __m512i other = _mm512_add_epi64(_mm512_mul_epu32(s.low, f1), _mm512_and_epi64(cross, ones));
    const __m512i carried = _mm512_add_epi64(_mm512_srli_epi64(cross, 32), _mm512_srli_epi64(other, 32));
    const __m512i outer = _mm512_add_epi64(_mm512_mullo_epi64(s.high, f.low), _mm512_mullo_epi64(s.low, f.high));
    const __m512i low = _mm512_add_epi64(_mm512_mullo_epi64(s.low, f.low), a.low);
    const __m512i above = _mm512_add_epi64(_mm512_mul_epu32(s1, f1), carried);
    const __m512i high = _mm512_add_epi64(above, _mm512_add_epi64(outer, a.high));
    const __mmask8 carry = _mm512_cmplt_epu64_mask(low, a.low);
    return (Eight){low, _mm512_mask_sub_epi64(high, carry, high, _mm512_set1_epi64(-1))};
}

/* `word_of` for each. */
ALWAYS_INLINE __m512i words_of(Eight s) {
    __m512i high = _mm512_xor_epi64(s.high, _mm512_srli_epi64(s.high, 32));
    high = _mm512_mullo_epi64(high, _mm512_set1_epi64((int64_t)MULTIPLIER));
    high = _mm512_xor_epi64(high, _mm512_srli_epi64(high, 48));
    return _mm512_mullo_epi64(high, _mm512_or_epi64(s.low, _mm512_set1_epi64(1)));
}

static inline Eight eight_times(u128 number) {
    return (Eight){_mm512_set1_epi64((int64_t)number), _mm512_set1_epi64((int64_t)(number >> 64))};
}

static inline Lanes lanes_of(u128 increment) {
    Lanes lanes = {.next = -1};
    u128 factor, added;
    jump_of(increment, LANES, &factor, &added);
    lanes.further = (Jumps){eight_times(factor), eight_times(added)};
    for (int half = 0; half < 2; half++) {
        uint64_t numbers[4][8];
        for (int i = 0; i < 8; i++) {
            jump_of(increment, 8 * half + i, &factor, &added);
            numbers[0][i] = factor, numbers[1][i] = factor >> 64, numbers[2][i] = added, numbers[3][i] = added >> 64;
        }
        lanes.apart[half].factor = (Eight){_mm512_loadu_si512(numbers[0]), _mm512_loadu_si512(numbers[1])};
        lanes.apart[half].added = (Eight){_mm512_loadu_si512(numbers[2]), _mm512_loadu_si512(numbers[3])};
    }
    return lanes;
}

/* The words of a block, and which of their numbers are in a tail. Afterwards `state` gives the word behind them. */
ALWAYS_INLINE uint64_t next_bits(Lanes *lanes, u128 *state, int64_t first, __m512i *bits) {
    const __m512i parts = _mm512_set1_epi16(TAIL_PARTS), both = _mm512_set1_epi16(2 * TAIL_PARTS);
    uint64_t met = 0;
    if (lanes->next != first)
        for (int half = 0; half < 2; half++) lanes->states[half] = after(eight_times(*state), &lanes->apart[half]);
    for (int half = 0; half < 2; half++) {
        bits[half] = words_of(lanes->states[half]);
        lanes->states[half] = after(lanes->states[half], &lanes->further);
        met |= (uint64_t)_mm512_cmplt_epu16_mask(_mm512_add_epi16(bits[half], parts), both) << (32 * half);
    }
    lanes->next = first + LANES;
    const uint64_t low = _mm_cvtsi128_si64(_mm512_castsi512_si128(lanes->states[0].low));
    *state = (u128)(uint64_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(lanes->states[0].high)) << 64 | low;
    return met;
}

/* `look_up` for a block. Numbers are looked up one by one: that is faster than the instruction which gathers them. */
ALWAYS_INLINE void look_up_block(const float *upper, const __m512i *bits, float *out) {
    uint16_t index[BLOCK];
    for (int half = 0; half < 2; half++) {
        const __m512i flip = _mm512_movm_epi16(_mm512_cmpgt_epi16_mask(bits[half], _mm512_set1_epi16(-1)));
        const __m512i place = _mm512_and_si512(_mm512_xor_si512(bits[half], flip), _mm512_set1_epi16(0x7fff));
        _mm512_storeu_si512(index + BLOCK / 2 * half, place);
    }
    uint32_t *to = (uint32_t *)out;
    for (int i = 0; i < BLOCK; i += 4) {
        uint32_t a, b, c, d;
        __builtin_memcpy(&a, upper + index[i], 4);
        __builtin_memcpy(&b, upper + index[i + 1], 4);
        __builtin_memcpy(&c, upper + index[i + 2], 4);
        __builtin_memcpy(&d, upper + index[i + 3], 4);
        __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d)); /* to make a vector of them takes longer */
        to[i] = a, to[i + 1] = b, to[i + 2] = c, to[i + 3] = d;
    }
    for (int quarter = 0; quarter < 4; quarter++) {
        const __m512i half = bits[quarter / 2];
        const __m256i some = quarter % 2 ? _mm512_extracti64x4_epi64(half, 1) : _mm512_castsi512_si256(half);
        const __m512i top = _mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16);
        const __m512i sign = _mm512_andnot_si512(top, _mm512_set1_epi32(INT32_MIN));
        float *here = out + 16 * quarter;
        _mm512_storeu_si512(here, _mm512_xor_si512(_mm512_loadu_si512(here), sign));
    }
}

#else
#define BEFOREHAND 0
#endif
#endif
