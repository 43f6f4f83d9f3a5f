/* Numbers of the stream in rising order of their places, as many at a time as the processor likes. */
#ifndef WIDEFLAT_NOISE_H
#define WIDEFLAT_NOISE_H

#include "lanes.h"

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

/* Where in the stream one thread is. */
typedef struct {
    u128 state, increment;
    int64_t next;  /* the word that `state` gives */
    uint64_t word; /* the one before it */
    u128 half_factor, half_added; /* of a jump by HALF words */
#ifdef BLOCK
    Lanes lanes;
#endif
} Reader;

static inline void jump(Reader *reader, u128 distance) {
    u128 factor, added;
    jump_of(reader->increment, distance, &factor, &added);
    reader->state = reader->state * factor + added;
}

static inline void go_to(Reader *reader, int64_t word) {
    if (word == reader->next) return;
    jump(reader, (u128)(word - reader->next));
    reader->next = word;
}

static inline Reader reader_of(const NoiseStream *stream) {
    Reader reader = {
        .state = (u128)stream->origin_high << 64 | stream->origin_low,
        .increment = (u128)stream->increment_high << 64 | stream->increment_low,
        .next = 0,
    };
    jump(&reader, (u128)stream->first_high << 64 | stream->first_low);
    jump_of(reader.increment, HALF, &reader.half_factor, &reader.half_added);
#ifdef BLOCK
    reader.lanes = lanes_of(reader.increment);
#endif
    return reader;
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

#ifdef BLOCK
/* The numbers of a block, which begins with a word of its own. */
ALWAYS_INLINE void draw_block(Reader *reader, const NoiseStream *stream, int64_t place, float *out, Ahead *ahead) {
    __m512i bits[2];
    fetch(ahead, BLOCK * sizeof(REAL) / LINE);
    go_to(reader, place / 4);
    uint64_t met = next_bits(&reader->lanes, &reader->state, reader->next, bits);
    reader->next += LANES;
    look_up_block(stream->quantiles, bits, out);
    if (!met) return;
    uint16_t parts[BLOCK];
    for (int half = 0; half < 2; half++) _mm512_storeu_si512(parts + BLOCK / 2 * half, bits[half]);
    for (; met; met &= met - 1) {
        const int i = __builtin_ctzll(met);
        out[i] = tail(stream, place + i, parts[i]);
    }
}
#endif

/* How many of `left` numbers from `place` on are best drawn at a time: a block, or what comes before or after one. */
static inline int64_t numbers_at(int64_t place, int64_t left) {
#ifdef BLOCK
    const int64_t before = (4 - place % 4) % 4;
    if (left - before >= BLOCK) return before ? before : BLOCK;
#endif
    (void)place;
    return left;
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
#ifdef BLOCK
    if (!skip && count == BLOCK) {
        draw_block(reader, stream, place, out, ahead);
        return;
    }
#endif
    fetch(ahead, LINES_AT_FIRST);
    if (first < reader->next) bits.words[at++] = reader->word; /* the last word was not used up */
    else go_to(reader, first);
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
