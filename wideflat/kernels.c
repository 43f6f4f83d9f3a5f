/* Gaussian noise on weights, and the steps of Entropy-SGD (Algorithm 1), each in one pass over memory.
 *
 * wideflat/kernels.py compiles this file with REAL = float or double. The noise is that of wideflat/gaussian_noise.py,
 * number by number: 16 random bits choose one of 65536 equally likely parts of the normal distribution. The bits come
 * from PCG64DXSM, a 128-bit congruential generator, which can jump to any place.
 *
 * Tensors are worked through in chunks that start at fixed elements, so that the result does not depend on the number
 * of threads, to the last bit.
 */
#include <stdint.h>

typedef unsigned __int128 u128;

#define CHUNK 1024
#define MULTIPLIER 0xda942042e4dd58b5ULL

typedef struct {
    uint64_t origin_high, origin_low, increment_high, increment_low; /* of the generator */
    uint64_t first_high, first_low;                                  /* the word that place 0 of this step uses */
    const float *quantiles; /* the upper half of the table: the other one has opposite signs */
} Source;

/* ------------------------------------------------------------------------------------------------------- the noise */

typedef struct {
    u128 state, increment;
    int64_t next; /* the word that `state` gives */
    uint64_t word; /* the one before it */
} Stream;

static void jump(Stream *stream, u128 distance) {
    u128 factor = 1, added = 0, multiplier = MULTIPLIER, increment = stream->increment;
    for (; distance; distance >>= 1) {
        if (distance & 1) {
            factor *= multiplier;
            added = added * multiplier + increment;
        }
        increment *= multiplier + 1;
        multiplier *= multiplier;
    }
    stream->state = stream->state * factor + added;
}

static Stream stream_of(const Source *source) {
    Stream stream = {
        .state = (u128)source->origin_high << 64 | source->origin_low,
        .increment = (u128)source->increment_high << 64 | source->increment_low,
        .next = 0,
    };
    jump(&stream, (u128)source->first_high << 64 | source->first_low);
    return stream;
}

static inline uint64_t next_word(Stream *stream) {
    uint64_t high = stream->state >> 64, low = (uint64_t)stream->state | 1;
    high ^= high >> 32;
    high *= MULTIPLIER;
    high ^= high >> 48;
    high *= low;
    stream->state = stream->state * MULTIPLIER + stream->increment;
    stream->next++;
    return stream->word = high;
}

/* A number out of 16 bits. Below the middle the table is mirrored: quantile(b) = -quantile(65535 - b). */
static inline float quantile(const float *upper, uint32_t bits) {
    uint32_t below = (bits >> 15) - 1; /* all ones, or zero */
    union {
        float number;
        uint32_t bits;
    } value = {.number = upper[(bits ^ below) & 0x7fff]};
    value.bits ^= below & 0x80000000u;
    return value.number;
}

/* The numbers of at most a chunk of places from `place` on; four of them share a word. Those of one stream are asked for
 * in rising order. First all bits, then all numbers: that keeps the processor's two sides busy. */
static void draw(Stream *stream, const float *upper, int64_t place, int64_t count, float *out) {
    union {
        uint64_t words[CHUNK / 4 + 1];
        uint16_t parts[CHUNK + 4];
    } bits;
    const int64_t first = place / 4, skip = place % 4, words = (skip + count + 3) / 4;
    int64_t at = 0;
    if (first < stream->next) { /* the last word was not used up */
        bits.words[at++] = stream->word;
    } else if (first > stream->next) {
        jump(stream, (u128)(first - stream->next));
        stream->next = first;
    }
    while (at < words) bits.words[at++] = next_word(stream);
    for (int64_t i = 0; i < count; i++) out[i] = quantile(upper, bits.parts[skip + i]);
}

/* out <- z * w, or z itself without w */
void multiply(int64_t threads, int64_t count, const Source *source, REAL *out, const REAL *w) {
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
#endif
    for (int64_t part = 0; part < threads; part++) {
        float z[CHUNK];
        Stream stream = stream_of(source);
        for (int64_t chunk = part * chunks / threads; chunk < (part + 1) * chunks / threads; chunk++) {
            const int64_t at = chunk * CHUNK, n = count - at < CHUNK ? count - at : CHUNK;
            draw(&stream, source->quantiles, at, n, z);
            if (w)
                for (int64_t i = 0; i < n; i++) out[at + i] = z[i] * w[at + i];
            else
                for (int64_t i = 0; i < n; i++) out[at + i] = z[i];
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- the steps */

typedef struct {
    double lr, momentum, nesterov, weight_decay, gamma, alpha, noise;
    int64_t starting; /* the first step of a cycle: w' = w, no velocity, and mu starts from w */
} Rule;

enum { PLAIN, MOMENTUM, NESTEROV };

#define ALWAYS static inline __attribute__((always_inline))

/* w' <- w' - eta' dw' + noise z and mu <- alpha mu + (1 - alpha) w', where dw' = g + gamma (w' - w) + weight decay w'
 * goes through the velocity v. */
ALWAYS void inner_chunk(
    int kind, int starting, int noisy, int64_t n, const Rule *rule, REAL *restrict x, REAL *restrict w,
    REAL *restrict mu, REAL *restrict v, const REAL *restrict g, const float *restrict z
) {
    const REAL lr = rule->lr, momentum = rule->momentum, decay = rule->weight_decay, gamma = rule->gamma;
    const REAL noise = rule->noise, fresh = 1 - rule->alpha, alpha = rule->alpha;
    const int late = rule->alpha <= 0.5; /* which of two forms of the mean rounds less, as torch.lerp does */
    for (int64_t i = 0; i < n; i++) {
        const REAL old = x[i];
        REAL d = g[i] + decay * old;
        if (!starting) d += gamma * (old - w[i]);
        if (kind != PLAIN) {
            const REAL velocity = starting ? d : momentum * v[i] + d;
            v[i] = velocity;
            d = kind == NESTEROV ? d + momentum * velocity : velocity;
        }
        REAL now = old - lr * d;
        if (noisy) now += noise * z[i];
        const REAL before = starting ? old : mu[i];
        if (starting) w[i] = old;
        x[i] = now;
        mu[i] = late ? now - alpha * (now - before) : before + fresh * (now - before);
    }
}

/* w <- w - eta dw, where dw = w - mu + weight decay w goes through the velocity v, and w' <- w. */
ALWAYS void outer_chunk(
    int kind, int64_t n, const Rule *rule, REAL *restrict x, REAL *restrict w, const REAL *restrict mu, REAL *restrict v
) {
    const REAL lr = rule->lr, momentum = rule->momentum, decay = rule->weight_decay;
    for (int64_t i = 0; i < n; i++) {
        REAL d = w[i] - mu[i] + decay * w[i];
        if (kind != PLAIN) {
            const REAL velocity = momentum * v[i] + d;
            v[i] = velocity;
            d = kind == NESTEROV ? d + momentum * velocity : velocity;
        }
        x[i] = w[i] = w[i] - lr * d;
    }
}

#define INNER(kind, starting, noisy) \
    inner_chunk(kind, starting, noisy, n, rule, x[t] + at, w[t] + at, mu[t] + at, kind ? v[t] + at : 0, g[t] + at, z)
#define INNER_KIND(kind) \
    do { \
        if (rule->starting) \
            if (source) INNER(kind, 1, 1); \
            else INNER(kind, 1, 0); \
        else if (source) INNER(kind, 0, 1); \
        else INNER(kind, 0, 0); \
    } while (0)
#define OUTER(kind) outer_chunk(kind, n, rule, x[t] + at, w[t] + at, mu[t] + at, kind ? v[t] + at : 0)

/* Chunks `from` to `to` of all chunks of all tensors. Without gradients it is the outer step, without a source there is
 * no noise. */
static void work(
    int64_t from, int64_t to, int64_t tensors, const int64_t *sizes, const int64_t *places, const Rule *rule,
    const Source *source, REAL *const *x, REAL *const *w, REAL *const *mu, REAL *const *v, const REAL *const *g
) {
    const int kind = rule->momentum == 0 ? PLAIN : rule->nesterov ? NESTEROV : MOMENTUM;
    float z[CHUNK];
    Stream stream = {0};
    if (source) stream = stream_of(source);
    int64_t first = 0; /* of the tensor */
    for (int64_t t = 0; t < tensors && first < to; t++) {
        const int64_t chunks = (sizes[t] + CHUNK - 1) / CHUNK;
        const int64_t begin = from > first ? from - first : 0, end = to - first < chunks ? to - first : chunks;
        for (int64_t chunk = begin; chunk < end; chunk++) {
            const int64_t at = chunk * CHUNK, n = sizes[t] - at < CHUNK ? sizes[t] - at : CHUNK;
            if (source) draw(&stream, source->quantiles, places[t] + at, n, z);
            if (g) {
                if (kind == PLAIN) INNER_KIND(PLAIN);
                else if (kind == MOMENTUM) INNER_KIND(MOMENTUM);
                else INNER_KIND(NESTEROV);
            } else {
                if (kind == PLAIN) OUTER(PLAIN);
                else if (kind == MOMENTUM) OUTER(MOMENTUM);
                else OUTER(NESTEROV);
            }
        }
        first += chunks;
    }
}

void step(
    int64_t threads, int64_t tensors, const int64_t *sizes, const int64_t *places, const Rule *rule,
    const Source *source, REAL *const *x, REAL *const *w, REAL *const *mu, REAL *const *v, const REAL *const *g
) {
    int64_t chunks = 0;
    for (int64_t t = 0; t < tensors; t++) chunks += (sizes[t] + CHUNK - 1) / CHUNK;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
#endif
    for (int64_t part = 0; part < threads; part++)
        work(
            part * chunks / threads, (part + 1) * chunks / threads, tensors, sizes, places, rule, source, x, w, mu, v, g
        );
}
