/* Passes over float arrays that read memory once, where torch operations read it several times.
 *
 * Plain C11, loaded by native.py. The reference are the pure functions of optim/functional.py and
 * the torch operations of statistics/second_moment.py. One call does a list of layers, with threads
 * that live as long as the call. Sums are kept in double, so the number of threads changes only
 * their last bits.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

_Static_assert(sizeof(void *) == 8, "native.py passes addresses of 8 bytes");

/* One binary for every x86: the loader chooses the widest registers of the machine. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    BLOCK = 4096,     /* elements whose sums are kept in float */
    SHARED = 1 << 18, /* all threads share a layer of more elements */
    MAX_THREADS = 256,
    SUMS = 2,         /* sums of the first pass for the second, per layer and thread */
    STATS = 5,        /* statistics of GSNR scaling, per layer and thread */
};

/* ---- threads ------------------------------------------------------------------------------- */

typedef void Work(void *job, int id, int threads);
typedef struct {
    Work *work;
    void *job;
    int id;
    atomic_int *threads; /* 0 until all have started */
} Worker;

static void *start(void *argument) {
    Worker *worker = argument;
    int threads;
    while (!(threads = atomic_load(worker->threads))) sched_yield();
    worker->work(worker->job, worker->id, threads);
    return NULL;
}

static void run_threads(Work *work, void *job, int max_threads) {
    Worker workers[MAX_THREADS];
    pthread_t handles[MAX_THREADS];
    atomic_int threads = 0;
    int started = 1;
    for (; started < max_threads && started < MAX_THREADS; started++) {
        workers[started] = (Worker){work, job, started, &threads};
        if (pthread_create(&handles[started], NULL, start, &workers[started])) break;
    }
    atomic_store(&threads, started);
    work(job, 0, started);
    for (int id = 1; id < started; id++) pthread_join(handles[id], NULL);
}

typedef struct {
    int64_t from, to;
} Slice;

static Slice slice(int64_t n, int id, int threads) {
    int64_t each = (n / threads + 16) & ~(int64_t)15, from = each * id, to = from + each;
    return (Slice){from < n ? from : n, to < n ? to : n};
}

/* ---- layers: one or two passes over each, the second with the sums of the first ------------- */

typedef struct {
    float *a, *b, *c, *d;
} Layer;

typedef struct Job Job;
typedef void Pass(const Job *job, int64_t layer, int id, Slice part);
struct Job {
    const Layer *layers;
    const int64_t *lengths; /* elements of each layer */
    int64_t count;
    const double *layer_values; /* two numbers for each layer */
    const double *group_values; /* the numbers that all layers share */
    double *sums;         /* [thread][layer][SUMS], zero at first */
    double *stats;        /* [thread][layer][STATS], zero at first; or NULL */
    Pass *first, *second; /* either may be NULL */
    int threads;
    atomic_llong arrived, next;
};

static double *sums_of(const Job *job, int64_t layer, int id) {
    return job->sums + (id * job->count + layer) * SUMS;
}

static double total(const Job *job, int64_t layer, int which) {
    double sum = 0;
    for (int id = 0; id < job->threads; id++) sum += sums_of(job, layer, id)[which];
    return sum;
}

static void barrier(Job *job, int threads) {
    long long turn = atomic_fetch_add(&job->arrived, 1) / threads;
    while (atomic_load(&job->arrived) < (turn + 1) * threads) sched_yield();
}

static void run_layers(void *argument, int id, int threads) {
    Job *job = argument;
    for (int64_t l = 0; threads > 1 && l < job->count; l++) {
        if (job->lengths[l] <= SHARED) continue;
        Slice part = slice(job->lengths[l], id, threads);
        if (job->first) job->first(job, l, id, part);
        if (job->first && job->second) barrier(job, threads);
        if (job->second) job->second(job, l, id, part);
    }
    for (int64_t l; (l = atomic_fetch_add(&job->next, 1)) < job->count;) {
        Slice all = {0, job->lengths[l]};
        if (threads > 1 && all.to > SHARED) continue;
        if (job->first) job->first(job, l, id, all);
        if (job->second) job->second(job, l, id, all);
    }
}

/* ---- second moment of the micro-batch gradients ---------------------------------------------- */

typedef struct {
    const float *gradient;
    float *sum, *m2;
    int64_t n;
    float mean_of, weight;
    int sums;
} Welford;

INLINE void add_deviations(const Welford *w, Slice part, const int sums) {
    const float *gradient = w->gradient, mean_of = w->mean_of, weight = w->weight;
    float *sum = w->sum, *m2 = w->m2;
#pragma omp simd
    for (int64_t i = part.from; i < part.to; i++) {
        float deviation = gradient[i] - mean_of * sum[i];
        m2[i] += weight * deviation * deviation;
        if (sums) sum[i] += gradient[i];
    }
}

WIDE static void welford_part(const Welford *w, Slice part) {
    if (w->sums)
        add_deviations(w, part, 1);
    else
        add_deviations(w, part, 0);
}

static void welford_work(void *job, int id, int threads) {
    const Welford *w = job;
    welford_part(w, slice(w->n, id, threads));
}

/* m2 += weight (gradient - mean_of sum)^2;  sum += gradient, if sums */
void welford(const float *gradient, float *sum, float *m2, int64_t n, double mean_of,
             double weight, int sums, int threads) {
    Welford job = {gradient, sum, m2, n, (float)mean_of, (float)weight, sums};
    run_threads(welford_work, &job, threads);
}

/* ---- gsnr: gradient times r, or times the average of r -------------------------------------- */

/* layers: sum, m2, gradient, average (NULL for none); layer_values: 1 / (1 - beta3^t) */
enum { WEIGHT, LIMIT, GAMMA, R_MAX, BETA3 };

/* in this order no square overflows or underflows before m2 does */
INLINE float ratio(float s, float m2, float share) { return s / m2 * s * share; }

WIDE static void ratio_sums(const Job *job, int64_t layer, int id, Slice part) {
    const float *s = job->layers[layer].a, *m2 = job->layers[layer].b;
    const double *values = job->group_values;
    const float share = (float)(1 / values[WEIGHT]), limit = (float)values[LIMIT];
    double sum = 0, live = 0;
    for (int64_t from = part.from; from < part.to; from += BLOCK) {
        int64_t to = from + BLOCK < part.to ? from + BLOCK : part.to;
        float q_sum = 0, q_live = 0;
#pragma omp simd reduction(+ : q_sum, q_live)
        for (int64_t i = from; i < to; i++) {
            float q = ratio(s[i], m2[i], share);
            q_sum += q < limit ? q : 0;
            q_live += q < limit ? 1 : 0;
        }
        sum += q_sum;
        live += q_live;
    }
    sums_of(job, layer, id)[0] += sum;
    sums_of(job, layer, id)[1] += live;
}

typedef struct {
    float share, limit, scale, gamma, r_max, lerp, correction;
} Gsnr;

INLINE void gsnr_part(const Layer *l, Slice part, const Gsnr *f, double *stats,
                      const int averages) {
    const float *s = l->a, *m2 = l->b;
    float *g = l->c, *p = l->d;
    const Gsnr k = *f;
    /* backwards: the cache still has what the first pass read last */
    for (int64_t to = part.to, from; to > part.from; to = from) {
        from = to - BLOCK > part.from ? to - BLOCK : part.from;
        float r_sum = 0, low = 0, high = 0, before = 0, after = 0;
#pragma omp simd reduction(+ : r_sum, low, high, before, after)
        for (int64_t i = from; i < to; i++) {
            float q = ratio(s[i], m2[i], k.share);
            float r = q < k.limit ? k.scale * q : q >= k.limit ? k.r_max : k.gamma;
            r = r > k.gamma ? r : k.gamma; /* nan: a dead element */
            r = r < k.r_max ? r : k.r_max;
            if (stats) {
                r_sum += r;
                low += r <= k.gamma ? 1 : 0;
                high += r >= k.r_max ? 1 : 0;
            }
            if (averages) {
                p[i] += k.lerp * (r - p[i]);
                r = p[i] * k.correction;
            }
            float scaled = r * g[i];
            if (stats) {
                before += g[i] * g[i];
                after += scaled * scaled;
            }
            g[i] = scaled;
        }
        if (stats) {
            stats[0] += r_sum;
            stats[1] += low;
            stats[2] += high;
            stats[3] += before;
            stats[4] += after;
        }
    }
}

WIDE static void gsnr_pass(const Job *job, int64_t layer, int id, Slice part) {
    const Layer *l = &job->layers[layer];
    const double *values = job->group_values;
    double live = total(job, layer, 1), scale = (live > 1 ? live : 1) / total(job, layer, 0);
    Gsnr f = {(float)(1 / values[WEIGHT]), (float)values[LIMIT], (float)scale,
              (float)values[GAMMA], (float)values[R_MAX], (float)(1 - values[BETA3]),
              (float)job->layer_values[2 * layer]};
    double *stats = job->stats ? job->stats + (id * job->count + layer) * STATS : 0;
    l->d ? stats ? gsnr_part(l, part, &f, stats, 1) : gsnr_part(l, part, &f, 0, 1)
         : stats ? gsnr_part(l, part, &f, stats, 0) : gsnr_part(l, part, &f, 0, 0);
}

/* ---- LARS: layers theta, gradient, buffer ---------------------------------------------------- */

enum { LR, DECAY, SIGN, ADAPTS, MOMENTUM, TRUST, NESTEROV };      /* LARS */
enum { BETA1 = MOMENTUM, BETA2, EPS }; /* LAMB, after the same four */

WIDE static void lars_norms(const Job *job, int64_t layer, int id, Slice part) {
    const float *theta = job->layers[layer].a, *g = job->layers[layer].b;
    double *sums = sums_of(job, layer, id), ww = 0, gg = 0;
#pragma omp simd reduction(+ : ww, gg)
    for (int64_t i = part.from; i < part.to; i++) {
        ww += (double)theta[i] * theta[i];
        gg += (double)g[i] * g[i]; /* in float the square of 1e-23 is 0 */
    }
    sums[0] += ww;
    sums[1] += gg;
}

WIDE static void lars_step(const Job *job, int64_t layer, int id, Slice part) {
    (void)id;
    float *theta = job->layers[layer].a, *g = job->layers[layer].b, *buffer = job->layers[layer].c;
    const double *values = job->group_values;
    double weight = sqrt(total(job, layer, 0)), gradient = sqrt(total(job, layer, 1)), rate = 1;
    if (values[ADAPTS] && weight > 0 && gradient > 0)
        rate = values[TRUST] * weight / (gradient + values[DECAY] * weight);
    const float lr = (float)(values[LR] * rate), sign = (float)values[SIGN],
                decay = (float)values[DECAY], momentum = (float)values[MOMENTUM];
    const int nesterov = (int)values[NESTEROV];
    for (int64_t to = part.to, from; to > part.from; to = from) {
        from = to - BLOCK > part.from ? to - BLOCK : part.from;
#pragma omp simd
        for (int64_t i = from; i < to; i++) {
            float update = lr * (sign * g[i] + decay * theta[i]);
            buffer[i] = momentum * buffer[i] + update;
            theta[i] -= nesterov ? momentum * buffer[i] + update : buffer[i];
        }
    }
}

/* ---- LAMB: layers theta, gradient, m, v; layer_values: 1 - beta1^t and 1 - beta2^t ----------- */

INLINE float direction(float theta, float m, float v, float c1, float c2, float eps, float decay) {
    return c1 * m / (sqrtf(c2 * v) + eps) + decay * theta;
}

WIDE static void lamb_moments(const Job *job, int64_t layer, int id, Slice part) {
    const Layer *l = &job->layers[layer];
    const float *theta = l->a, *g = l->b;
    float *m = l->c, *v = l->d;
    const double *values = job->group_values;
    const float b1 = (float)(1 - values[BETA1]), b2 = (float)(1 - values[BETA2]),
                sign = (float)values[SIGN], eps = (float)values[EPS], decay = (float)values[DECAY],
                c1 = (float)(1 / job->layer_values[2 * layer]),
                c2 = (float)(1 / job->layer_values[2 * layer + 1]);
    double *sums = sums_of(job, layer, id), ww = 0, uu = 0;
#pragma omp simd reduction(+ : ww, uu)
    for (int64_t i = part.from; i < part.to; i++) {
        m[i] += b1 * (sign * g[i] - m[i]);
        v[i] += b2 * (g[i] * g[i] - v[i]);
        float u = direction(theta[i], m[i], v[i], c1, c2, eps, decay);
        ww += (double)theta[i] * theta[i];
        uu += (double)u * u;
    }
    sums[0] += ww;
    sums[1] += uu;
}

WIDE static void lamb_step(const Job *job, int64_t layer, int id, Slice part) {
    (void)id;
    const Layer *l = &job->layers[layer];
    const float *m = l->c, *v = l->d;
    float *theta = l->a;
    const double *values = job->group_values;
    double weight = sqrt(total(job, layer, 0)), update = sqrt(total(job, layer, 1)), rate = 1;
    if (values[ADAPTS] && weight > 0 && update > 0) rate = weight / update;
    const float lr = (float)(values[LR] * rate), eps = (float)values[EPS],
                decay = (float)values[DECAY], c1 = (float)(1 / job->layer_values[2 * layer]),
                c2 = (float)(1 / job->layer_values[2 * layer + 1]);
    for (int64_t to = part.to, from; to > part.from; to = from) {
        from = to - BLOCK > part.from ? to - BLOCK : part.from;
#pragma omp simd
        for (int64_t i = from; i < to; i++)
            theta[i] -= lr * direction(theta[i], m[i], v[i], c1, c2, eps, decay);
    }
}

/* ---- the calls ------------------------------------------------------------------------------ */

enum { APPLY_GSNR, LARS, LAMB };

/* Applies one rule to a list of layers. passes: 1, the first, which writes the sums; 2, the second,
 * which reads them as those of thread 0; 3, both. */
void apply_rule(int rule, int passes, const Layer *layers, const int64_t *lengths, int64_t count,
                const double *layer_values, const double *group_values, double *sums,
                double *stats, int threads) {
    static Pass *const first[] = {ratio_sums, lars_norms, lamb_moments};
    static Pass *const second[] = {gsnr_pass, lars_step, lamb_step};
    Job job = {.layers = layers, .lengths = lengths, .count = count, .layer_values = layer_values,
               .group_values = group_values, .sums = sums, .stats = stats,
               .first = passes & 1 ? first[rule] : 0, .second = passes & 2 ? second[rule] : 0,
               .threads = threads};
    run_threads(run_layers, &job, threads);
}
