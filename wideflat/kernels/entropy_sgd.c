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

#define AT(list) (list[t] + at)
#define INNER(kind, starting, noisy, mean) \
    inner_chunk( \
        kind, starting, noisy, mean, n, rule, AT(x), AT(w), mean ? AT(mu) : 0, kind ? AT(v) : 0, AT(g), z \
    )
#define INNER_MEAN(kind, starting, noisy) \
    do { \
        if (mu) INNER(kind, starting, noisy, 1); \
        else INNER(kind, starting, noisy, 0); \
    } while (0)
#define INNER_KIND(kind) \
    do { \
        if (rule->starting) \
            if (noise) INNER_MEAN(kind, 1, 1); \
            else INNER_MEAN(kind, 1, 0); \
        else if (noise) INNER_MEAN(kind, 0, 1); \
        else INNER_MEAN(kind, 0, 0); \
    } while (0)
#define OUTER(kind) \
    do { \
        if (mu) outer_chunk(kind, 1, n, rule, AT(x), AT(w), AT(mu), kind ? AT(v) : 0); \
        else outer_chunk(kind, 0, n, rule, AT(x), AT(w), 0, kind ? AT(v) : 0); \
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
        if (noise) {
            Ahead ahead = {.bytes = n * (int64_t)sizeof(REAL)};
            const REAL *arrays[] = {AT(x), AT(w), mu ? AT(mu) : 0, kind ? AT(v) : 0, g ? AT(g) : 0};
            for (int k = 0; k < 5; k++) look_ahead_at(&ahead, arrays[k]);
            draw(&reader, noise, places[t] + at, n, z, &ahead);
        }
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
