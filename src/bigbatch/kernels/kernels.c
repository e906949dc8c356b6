/* Passes over float arrays that torch would make in several, so that memory is read once.
 *
 * Plain C11, loaded by native.py; the reference are the pure functions of optim/functional.py and the
 * torch operations of statistics/second_moment.py. A list of layers is one call, shared by threads that live
 * as long as it. Sums are kept in double: the number of threads changes their last
 * bits only.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

_Static_assert(sizeof(void *) == 8, "native.py passes addresses of 8 bytes");

/* One binary for every x86: the loader takes the widest registers that the machine has. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    BLOCK = 4096,     /* elements whose sums are kept in float */
    SHARED = 1 << 18, /* a layer of more elements is shared by all threads */
    MOST = 256,       /* threads */
    SUMS = 2,         /* what a first pass leaves for the second, a layer and thread */
    SEEN = 5,         /* what GSNR scaling reports, a layer and thread */
};

/* ---- threads ------------------------------------------------------------------------------- */

typedef void Work(void *job, int id, int threads);
typedef struct {
    Work *work;
    void *job;
    int id;
    atomic_int *threads; /* 0 until all that could be had are there */
} Worker;

static void *start(void *argument) {
    Worker *worker = argument;
    int threads;
    while (!(threads = atomic_load(worker->threads))) sched_yield();
    worker->work(worker->job, worker->id, threads);
    return NULL;
}

static void share(Work *work, void *job, int wanted) {
    Worker workers[MOST];
    pthread_t handles[MOST];
    atomic_int threads = 0;
    int there = 1;
    for (; there < wanted && there < MOST; there++) {
        workers[there] = (Worker){work, job, there, &threads};
        if (pthread_create(&handles[there], NULL, start, &workers[there])) break;
    }
    atomic_store(&threads, there);
    work(job, 0, there);
    for (int id = 1; id < there; id++) pthread_join(handles[id], NULL);
}

typedef struct {
    int64_t from, to;
} Slice;

static Slice slice(int64_t n, int id, int threads) {
    int64_t each = (n / threads + 16) & ~(int64_t)15, from = each * id, to = from + each;
    return (Slice){from < n ? from : n, to < n ? to : n};
}

/* ---- layers: one or two passes over each, the second knowing the sums of the first ---------- */

typedef struct {
    float *a, *b, *c, *d;
} Layer;

typedef struct Job Job;
typedef void Pass(const Job *job, int64_t layer, int id, Slice part);
struct Job {
    const Layer *layers;
    const int64_t *lengths; /* elements of each layer */
    int64_t count;
    const double *own;   /* two numbers of each layer */
    const double *group; /* what holds for all */
    double *sums;        /* [thread][layer][SUMS], zero at first */
    double *seen;        /* [thread][layer][SEEN], zero at first; or NULL */
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

static void meet(Job *job, int threads) {
    long long turn = atomic_fetch_add(&job->arrived, 1) / threads;
    while (atomic_load(&job->arrived) < (turn + 1) * threads) sched_yield();
}

static void over_layers(void *argument, int id, int threads) {
    Job *job = argument;
    for (int64_t l = 0; threads > 1 && l < job->count; l++) {
        if (job->lengths[l] <= SHARED) continue;
        Slice part = slice(job->lengths[l], id, threads);
        if (job->first) job->first(job, l, id, part);
        if (job->first && job->second) meet(job, threads);
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

/* m2 += weight (gradient - mean_of sum)^2;  where asked for, sum += gradient */
void welford(const float *gradient, float *sum, float *m2, int64_t n, double mean_of,
             double weight, int sums, int threads) {
    Welford job = {gradient, sum, m2, n, (float)mean_of, (float)weight, sums};
    share(welford_work, &job, threads);
}

/* ---- gsnr: gradient times r, or times the average of r ---------------------------------------- */

/* layers: sum, m2, gradient, average (NULL for none); own: 1 / (1 - beta3^t) */
enum { WEIGHT, LIMIT, RULE, SCALE, GAMMA, R_MAX, BETA3 };
enum { GSNR, SHRINKAGE, POSITIVE_PART };

/* in this order no square over- or underflows before m2 does */
INLINE float ratio(float s, float m2, float share) { return s / m2 * s * share; }

WIDE static void ratio_sums(const Job *job, int64_t layer, int id, Slice part) {
    const float *s = job->layers[layer].a, *m2 = job->layers[layer].b;
    const float share = (float)(1 / job->group[WEIGHT]), limit = (float)job->group[LIMIT];
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
    float share, limit, scale, offset, gamma, r_max, lerp, corrected;
} Gsnr;

INLINE void gsnr_part(const Layer *l, Slice part, const Gsnr *f, double *seen, const int shrinks,
                      const int averages) {
    const float *s = l->a, *m2 = l->b;
    float *g = l->c, *p = l->d;
    const Gsnr k = *f;
    /* backwards: what the first pass read last is still in cache */
    for (int64_t to = part.to, from; to > part.from; to = from) {
        from = to - BLOCK > part.from ? to - BLOCK : part.from;
        float r_sum = 0, low = 0, high = 0, before = 0, after = 0;
#pragma omp simd reduction(+ : r_sum, low, high, before, after)
        for (int64_t i = from; i < to; i++) {
            float q = ratio(s[i], m2[i], k.share), r;
            if (shrinks)
                r = 1 - 1 / (k.offset + k.scale * q);
            else
                r = q < k.limit ? k.scale * q : q >= k.limit ? k.r_max : k.gamma;
            r = r > k.gamma ? r : k.gamma; /* not a number: dead */
            r = r < k.r_max ? r : k.r_max;
            if (seen) {
                r_sum += r;
                low += r <= k.gamma ? 1 : 0;
                high += r >= k.r_max ? 1 : 0;
            }
            if (averages) {
                p[i] += k.lerp * (r - p[i]);
                r = p[i] * k.corrected;
            }
            float scaled = r * g[i];
            if (seen) {
                before += g[i] * g[i];
                after += scaled * scaled;
            }
            g[i] = scaled;
        }
        if (seen) {
            seen[0] += r_sum;
            seen[1] += low;
            seen[2] += high;
            seen[3] += before;
            seen[4] += after;
        }
    }
}

WIDE static void gsnr_pass(const Job *job, int64_t layer, int id, Slice part) {
    const Layer *l = &job->layers[layer];
    const double *group = job->group;
    const int rule = (int)group[RULE];
    double scale = group[SCALE];
    if (rule == GSNR) {
        double live = total(job, layer, 1);
        scale = (live > 1 ? live : 1) / total(job, layer, 0);
    }
    Gsnr f = {(float)(1 / group[WEIGHT]), (float)group[LIMIT], (float)scale, rule == SHRINKAGE,
              (float)group[GAMMA], (float)group[R_MAX], (float)(1 - group[BETA3]),
              (float)job->own[2 * layer]};
    double *seen = job->seen ? job->seen + (id * job->count + layer) * SEEN : 0;
    if (rule == GSNR)
        l->d ? seen ? gsnr_part(l, part, &f, seen, 0, 1) : gsnr_part(l, part, &f, 0, 0, 1)
             : seen ? gsnr_part(l, part, &f, seen, 0, 0) : gsnr_part(l, part, &f, 0, 0, 0);
    else
        l->d ? seen ? gsnr_part(l, part, &f, seen, 1, 1) : gsnr_part(l, part, &f, 0, 1, 1)
             : seen ? gsnr_part(l, part, &f, seen, 1, 0) : gsnr_part(l, part, &f, 0, 1, 0);
}

/* ---- LARS: layers theta, gradient, buffer ------------------------------------------------------ */

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
    const double *group = job->group;
    double weight = sqrt(total(job, layer, 0)), gradient = sqrt(total(job, layer, 1)), rate = 1;
    if (group[ADAPTS] && weight > 0 && gradient > 0)
        rate = group[TRUST] * weight / (gradient + group[DECAY] * weight);
    const float lr = (float)(group[LR] * rate), sign = (float)group[SIGN],
                decay = (float)group[DECAY], momentum = (float)group[MOMENTUM];
    const int nesterov = (int)group[NESTEROV];
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

/* ---- LAMB: layers theta, gradient, m, v; own: 1 - beta1^t and 1 - beta2^t ------------------- */

INLINE float direction(float theta, float m, float v, float c1, float c2, float eps, float decay) {
    return c1 * m / (sqrtf(c2 * v) + eps) + decay * theta;
}

WIDE static void lamb_moments(const Job *job, int64_t layer, int id, Slice part) {
    const Layer *l = &job->layers[layer];
    const float *theta = l->a, *g = l->b;
    float *m = l->c, *v = l->d;
    const double *group = job->group;
    const float b1 = (float)(1 - group[BETA1]), b2 = (float)(1 - group[BETA2]),
                sign = (float)group[SIGN], eps = (float)group[EPS], decay = (float)group[DECAY],
                c1 = (float)(1 / job->own[2 * layer]), c2 = (float)(1 / job->own[2 * layer + 1]);
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
    const double *group = job->group;
    double weight = sqrt(total(job, layer, 0)), update = sqrt(total(job, layer, 1)), rate = 1;
    if (group[ADAPTS] && weight > 0 && update > 0) rate = weight / update;
    const float lr = (float)(group[LR] * rate), eps = (float)group[EPS],
                decay = (float)group[DECAY], c1 = (float)(1 / job->own[2 * layer]),
                c2 = (float)(1 / job->own[2 * layer + 1]);
    for (int64_t to = part.to, from; to > part.from; to = from) {
        from = to - BLOCK > part.from ? to - BLOCK : part.from;
#pragma omp simd
        for (int64_t i = from; i < to; i++)
            theta[i] -= lr * direction(theta[i], m[i], v[i], c1, c2, eps, decay);
    }
}

/* ---- the calls ---------------------------------------------------------------------------------- */

enum { APPLY_GSNR, LARS, LAMB };

/* One rule over a list of layers. passes: 1 the first, leaving its sums, 2 the second, taking them
 * from thread 0's place, 3 both. */
void run(int rule, int passes, const Layer *layers, const int64_t *lengths, int64_t count,
         const double *own, const double *group, double *sums, double *seen, int threads) {
    static Pass *const first[] = {ratio_sums, lars_norms, lamb_moments};
    static Pass *const second[] = {gsnr_pass, lars_step, lamb_step};
    Job job = {.layers = layers, .lengths = lengths, .count = count, .own = own, .group = group,
               .sums = sums, .seen = seen, .first = passes & 1 ? first[rule] : 0,
               .second = passes & 2 ? second[rule] : 0, .threads = threads};
    share(over_layers, &job, threads);
}
