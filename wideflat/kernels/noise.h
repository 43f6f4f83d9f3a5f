/* Gaussian noise as a function of (seed, step, place): that of wideflat/kernels/noise.py, number by number.
 *
 * 16 random bits choose one of 65536 equally likely parts of the normal distribution. They come from PCG64DXSM, a 128-bit
 * congruential generator, which can jump to any place. In the outermost parts further bits, which come from SplitMix64 at
 * the number's own place, choose a finer part: see `tail`.
 *
 * The files of this folder are compiled with REAL = float or double (wideflat/kernels/library.py).
 */
#ifndef WIDEFLAT_NOISE_H
#define WIDEFLAT_NOISE_H

#include "chunks.h"

typedef unsigned __int128 u128;

#define MULTIPLIER 0xda942042e4dd58b5ULL

/* Parts on each side that are cut more finely, how many bits cut them at a time, and how often. */
#define TAIL_PARTS 128
#define TAIL_BITS 4
#define TAIL_LEVELS 12

/* Numbers that are asked at a time whether one of them is in a tail. */
#define GROUP 8

/* Words of a chunk, and of half of it. */
#define WORDS (CHUNK / 4)
#define HALF (WORDS / 2)

/* Words of either half, and numbers, after which memory is fetched; and how many lines of it: by measurement. */
#define WORDS_AT_A_TIME 16
#define NUMBERS_AT_A_TIME 64
#define LINES_AT_FIRST 4
#define LINES_WITH_WORDS 2
#define LINES_WITH_NUMBERS 3

/* What the noise of one step is made from. */
typedef struct {
    uint64_t origin_high, origin_low, increment_high, increment_low; /* of the generator */
    uint64_t first_high, first_low;                                  /* the word that place 0 of this step uses */
    const float *quantiles; /* the upper half of the table: the other one has opposite signs */
    uint64_t tail_key;      /* of SplitMix64 for this step */
    const float *tails;     /* TAIL_LEVELS tables of TAIL_PARTS << TAIL_BITS numbers, the largest first */
} NoiseStream;

/* Where in the stream one thread is. */
typedef struct {
    u128 state, increment;
    int64_t next;  /* the word that `state` gives */
    uint64_t word; /* the one before it */
    u128 half_factor, half_added; /* of a jump by HALF words */
} Reader;

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

static inline void jump(Reader *reader, u128 distance) {
    u128 factor, added;
    jump_of(reader->increment, distance, &factor, &added);
    reader->state = reader->state * factor + added;
}

static inline Reader reader_of(const NoiseStream *stream) {
    Reader reader = {
        .state = (u128)stream->origin_high << 64 | stream->origin_low,
        .increment = (u128)stream->increment_high << 64 | stream->increment_low,
        .next = 0,
    };
    jump(&reader, (u128)stream->first_high << 64 | stream->first_low);
    jump_of(reader.increment, HALF, &reader.half_factor, &reader.half_added);
    return reader;
}

static inline uint64_t word_of(u128 state) {
    uint64_t high = state >> 64, low = (uint64_t)state | 1;
    high ^= high >> 32;
    high *= MULTIPLIER;
    high ^= high >> 48;
    return high * low;
}

static inline uint64_t next_word(Reader *reader) {
    reader->word = word_of(reader->state);
    reader->state = reader->state * MULTIPLIER + reader->increment;
    reader->next++;
    return reader->word;
}

/* WORDS words, the two halves side by side: one waits for its products while those of the other are computed. */
static inline void next_words(Reader *reader, uint64_t *words, Ahead *ahead) {
    u128 first = reader->state, second = first * reader->half_factor + reader->half_added;
    for (int64_t i = 0; i < HALF; i++) {
        if (i % WORDS_AT_A_TIME == 0) fetch(ahead, LINES_WITH_WORDS);
        words[i] = word_of(first);
        words[HALF + i] = word_of(second);
        first = first * MULTIPLIER + reader->increment;
        second = second * MULTIPLIER + reader->increment;
    }
    reader->state = second;
    reader->next += WORDS;
    reader->word = words[WORDS - 1];
}

/* Numbers out of 16 bits each, at most NUMBERS_AT_A_TIME. Below the middle the table is mirrored:
 * quantile(b) = -quantile(65535 - b). */
static inline void look_up(const float *upper, const uint16_t *parts, int64_t count, float *out) {
    uint16_t index[NUMBERS_AT_A_TIME];
    for (int64_t i = 0; i < count; i++) index[i] = (parts[i] >> 15 ? parts[i] : ~parts[i]) & 0x7fff;
    for (int64_t i = 0; i < count; i++) out[i] = upper[index[i]];
    for (int64_t i = 0; i < count; i++) out[i] = parts[i] >> 15 ? out[i] : -out[i];
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

/* Which of whole groups of numbers are in a tail, and how many: few are, and few groups have one. */
static __attribute__((noinline)) int64_t outermost_of(const uint16_t *parts, int64_t count, uint16_t *met) {
    uint8_t are[CHUNK + GROUP];
    int64_t many = 0;
    for (int64_t i = 0; i < count; i++) are[i] = is_outermost(parts[i]);
    for (int64_t i = 0; i < count; i += GROUP) {
        uint64_t some;
        __builtin_memcpy(&some, are + i, GROUP);
        for (; some; some &= some - 1) met[many++] = i + (__builtin_ctzll(some) >> 3);
    }
    return many;
}

/* The numbers of at most a chunk of places from `place` on; four of them share a word. Those of one reader are asked for
 * in rising order. First all bits, then all numbers: that keeps the processor's two sides busy. Meanwhile memory comes. */
static inline void draw(
    Reader *reader, const NoiseStream *stream, int64_t place, int64_t count, float *out, Ahead *ahead
) {
    union {
        uint64_t words[(CHUNK + GROUP) / 4];
        uint16_t parts[CHUNK + GROUP];
    } bits;
    const int64_t first = place / 4, skip = place % 4, words = (skip + count + 3) / 4;
    int64_t at = 0;
    fetch(ahead, LINES_AT_FIRST);
    if (first < reader->next) { /* the last word was not used up */
        bits.words[at++] = reader->word;
    } else if (first > reader->next) {
        jump(reader, (u128)(first - reader->next));
        reader->next = first;
    }
    if (words - at >= WORDS) {
        next_words(reader, bits.words + at, ahead);
        at += WORDS;
    }
    while (at < words) bits.words[at++] = next_word(reader);
    while (at % (GROUP / 4)) bits.words[at++] = 0x8000800080008000ULL; /* the middle: the last group is a whole one */
    for (int64_t i = 0; i < count; i += NUMBERS_AT_A_TIME) {
        fetch(ahead, LINES_WITH_NUMBERS);
        const int64_t some = count - i < NUMBERS_AT_A_TIME ? count - i : NUMBERS_AT_A_TIME;
        look_up(stream->quantiles, bits.parts + skip + i, some, out + i);
    }
    uint16_t met[CHUNK + GROUP];
    const int64_t many = outermost_of(bits.parts, 4 * at, met);
    for (int64_t k = 0; k < many; k++) {
        const int64_t i = (int64_t)met[k] - skip;
        if (i >= 0 && i < count) out[i] = tail(stream, place + i, bits.parts[met[k]]);
    }
}

#endif
