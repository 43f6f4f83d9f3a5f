/* The steps of Entropy-SGD (Algorithm 1), each in one pass over memory. */
#include "noise.h"

typedef struct {
    double lr, momentum, nesterov, weight_decay, gamma, alpha, noise;
    int64_t starting; /* the first step of a cycle: w' = w, no velocity, and mu starts from w */
} StepParameters;

enum { PLAIN, MOMENTUM, NESTEROV };

#define ALWAYS static inline __attribute__((always_inline))

/* w' <- w' - eta' dw' + noise z and mu <- alpha mu + (1 - alpha) w', where dw' = g + gamma (w' - w) + weight decay w'
 * goes through the velocity v. Without mu it is w' itself. */
ALWAYS void inner_chunk(
    int kind, int starting, int noisy, int mean, int64_t n, const StepParameters *rule, REAL *restrict x, REAL *restrict w,
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
        if (starting) w[i] = old;
        x[i] = now;
        if (mean) {
            const REAL before = starting ? old : mu[i];
            mu[i] = late ? now - alpha * (now - before) : before + fresh * (now - before);
        }
    }
}

/* w <- w - eta dw, where dw = w - mu + weight decay w goes through the velocity v, and w' <- w. */
ALWAYS void outer_chunk(
    int kind, int mean, int64_t n, const StepParameters *rule, REAL *restrict x, REAL *restrict w,
    const REAL *restrict mu, REAL *restrict v
) {
    const REAL lr = rule->lr, momentum = rule->momentum, decay = rule->weight_decay;
    for (int64_t i = 0; i < n; i++) {
        REAL d = w[i] - (mean ? mu[i] : x[i]) + decay * w[i];
        if (kind != PLAIN) {
            const REAL velocity = momentum * v[i] + d;
            v[i] = velocity;
            d = kind == NESTEROV ? d + momentum * velocity : velocity;
        }
        x[i] = w[i] = w[i] - lr * d;
    }
}

#define AT(list, place) (list[t] + (place))
#define INNER(kind, starting, noisy, mean, from, count) \
    inner_chunk( \
        kind, starting, noisy, mean, count, rule, AT(x, from), AT(w, from), mean ? AT(mu, from) : 0, \
        kind ? AT(v, from) : 0, AT(g, from), z \
    )
#define INNER_MEAN(kind, starting, noisy, from, count) \
    do { \
        if (mu) INNER(kind, starting, noisy, 1, from, count); \
        else INNER(kind, starting, noisy, 0, from, count); \
    } while (0)
#define INNER_START(kind, noisy, from, count) \
    do { \
        if (rule->starting) INNER_MEAN(kind, 1, noisy, from, count); \
        else INNER_MEAN(kind, 0, noisy, from, count); \
    } while (0)
#define INNER_KIND(noisy, from, count) \
    do { \
        if (kind == PLAIN) INNER_START(PLAIN, noisy, from, count); \
        else if (kind == MOMENTUM) INNER_START(MOMENTUM, noisy, from, count); \
        else INNER_START(NESTEROV, noisy, from, count); \
    } while (0)
#define OUTER(kind) \
    do { \
        if (mu) outer_chunk(kind, 1, n, rule, AT(x, at), AT(w, at), AT(mu, at), kind ? AT(v, at) : 0); \
        else outer_chunk(kind, 0, n, rule, AT(x, at), AT(w, at), 0, kind ? AT(v, at) : 0); \
    } while (0)

/* Chunks `from` to `to` of all chunks of all tensors. Without gradients it is the outer step, without a stream there is
 * no noise. */
static void work(
    int64_t from, int64_t to, const int64_t *sizes, const int64_t *places, const StepParameters *rule,
    const NoiseStream *noise, REAL *const *x, REAL *const *w, REAL *const *mu, REAL *const *v, const REAL *const *g
) {
    const int kind = rule->momentum == 0 ? PLAIN : rule->nesterov ? NESTEROV : MOMENTUM;
    float z[CHUNK];
    Reader reader = {0};
    if (noise) reader = reader_of(noise);
    for (Walk walk = walk_of(from, to, sizes); next_chunk(&walk, sizes);) {
        const int64_t t = walk.tensor, at = walk.at, n = walk.n;
        if (g && noise) {
            Ahead ahead = ahead_of(n, BEFOREHAND);
            const REAL *arrays[] = {AT(x, at), AT(w, at), mu ? AT(mu, at) : 0, kind ? AT(v, at) : 0, AT(g, at)};
            for (int k = 0; k < 5; k++) look_ahead_at(&ahead, arrays[k]);
            for (int64_t here = at, some; here < at + n; here += some) {
                some = numbers_at(places[t] + here, at + n - here);
                draw(&reader, noise, places[t] + here, some, z, &ahead);
                INNER_KIND(1, here, some);
            }
        } else if (g) {
            INNER_KIND(0, at, n);
        } else {
            if (kind == PLAIN) OUTER(PLAIN);
            else if (kind == MOMENTUM) OUTER(MOMENTUM);
            else OUTER(NESTEROV);
        }
    }
}

void step(
    int64_t threads, int64_t tensors, const int64_t *sizes, const int64_t *places, const StepParameters *rule,
    const NoiseStream *noise, REAL *const *x, REAL *const *w, REAL *const *mu, REAL *const *v, const REAL *const *g
) {
    const int64_t chunks = all_chunks(tensors, sizes);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
#endif
    for (int64_t part = 0; part < threads; part++)
        work(
            part * chunks / threads, (part + 1) * chunks / threads, sizes, places, rule, noise, x, w, mu, v, g
        );
}
