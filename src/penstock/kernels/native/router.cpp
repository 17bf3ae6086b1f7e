// The choice of experts by their router's logits (kernels/router.py). One row after another, each by itself.
#include "pool.h"
#include "scratch.h"
#include "vec.h"

namespace penstock::ISA {
namespace {

enum Scores : int64_t { kSoftmax = 0, kSigmoid = 1, kTopKSoftmax = 2 };

// As described in kernels/router.py.
struct Router {
    const float* correction;     // [num_experts] or null
    const float* expert_scales;  // [num_experts] or null
    int64_t num_experts;
    int64_t top_k;
    int64_t scores;
    int64_t num_groups;
    int64_t top_groups;
    int64_t sums_two_best;
    int64_t renormalizes;
    float least_sum;
    float scaling;
};

thread_local Scratch memory;

// out = exp(x - largest) of `count` numbers, divided by their sum. `out` may be `x`.
void softmax(const float* x, float* out, int64_t count) {
    float most = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; ++i) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < count; i += kLanes)
        store_first(out + i, exp2((load_first(x + i, count - i) - splat(most)) * splat(1.44269504f)), count - i);
    for (int64_t i = 0; i < count; ++i) total += out[i];
    for (int64_t i = 0; i < count; ++i) out[i] /= total;
}

void sigmoid(const float* x, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec a = load_first(x + i, count - i);
        store_first(out + i, splat(1) / (splat(1) + exp2(a * splat(-1.44269504f))), count - i);
    }
}

// Writes the ids of the `most` largest values in descending order; of equal ones the first comes first, and a NaN
// counts as infinity. There are at least `most` values.
void choose(const float* values, int64_t count, int64_t most, int64_t* ids) {
    const auto key = [&](int64_t i) { return values[i] != values[i] ? INFINITY : values[i]; };
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float value = key(i);
        if (found == most && !(value > key(ids[most - 1]))) continue;
        int64_t place = found < most ? found++ : most - 1;
        for (; place > 0 && value > key(ids[place - 1]); --place) ids[place] = ids[place - 1];
        ids[place] = i;
    }
}

// The group's best value, or the sum of its two best.
float group_score(const float* values, int64_t count, bool sums_two_best) {
    int64_t best[2];
    choose(values, count, sums_two_best ? 2 : 1, best);
    return sums_two_best ? values[best[0]] + values[best[1]] : values[best[0]];
}

// Sets the values of all but the best groups to minus infinity.
void keep_best_groups(const Router& router, float* values, float* group_scores, int64_t* best) {
    const int64_t size = router.num_experts / router.num_groups;
    for (int64_t group = 0; group < router.num_groups; ++group)
        group_scores[group] = group_score(values + group * size, size, router.sums_two_best != 0);
    choose(group_scores, router.num_groups, router.top_groups, best);
    for (int64_t group = 0; group < router.num_groups; ++group) {
        bool is_kept = false;
        for (int64_t place = 0; place < router.top_groups; ++place) is_kept |= best[place] == group;
        for (int64_t i = group * size; !is_kept && i < (group + 1) * size; ++i) values[i] = -INFINITY;
    }
}

void route_row(const Router& router, const float* logits, int64_t* ids, float* weights) {
    const int64_t count = router.num_experts;
    float* scores = reinterpret_cast<float*>(memory.reserve(count * (3 * sizeof(float) + sizeof(int64_t)) + 64));
    float *preference = scores + count, *group_scores = scores + 2 * count;
    int64_t* best_groups = reinterpret_cast<int64_t*>((reinterpret_cast<uintptr_t>(scores + 3 * count) + 7) & ~7);
    if (router.scores == kSoftmax)
        softmax(logits, scores, count);
    else if (router.scores == kSigmoid)
        sigmoid(logits, scores, count);
    else
        std::memcpy(scores, logits, count * sizeof(float));
    for (int64_t i = 0; i < count; ++i) preference[i] = router.correction ? scores[i] + router.correction[i] : scores[i];
    if (router.num_groups > 1) keep_best_groups(router, preference, group_scores, best_groups);
    choose(preference, count, router.top_k, ids);
    for (int64_t i = 0; i < router.top_k; ++i) weights[i] = scores[ids[i]];
    if (router.scores == kTopKSoftmax) softmax(weights, weights, router.top_k);
    if (router.renormalizes) {
        float total = weights[0];
        for (int64_t i = 1; i < router.top_k; ++i) total += weights[i];
        for (int64_t i = 0; i < router.top_k; ++i) weights[i] /= total + router.least_sum;
    }
    for (int64_t i = 0; i < router.top_k; ++i) {
        weights[i] *= router.scaling;
        if (router.expert_scales) weights[i] *= router.expert_scales[ids[i]];
    }
}

}  // namespace
}  // namespace penstock::ISA

// logits [rows, num_experts] -> ids and weights [rows, top_k].
PENSTOCK_EXPORT(void, route)
(const penstock::ISA::Router* router, const float* logits, int64_t* ids, float* weights, int64_t rows, int64_t threads) {
    run_each(rows, router->num_experts * 4, threads, [&](int64_t row) {
        penstock::ISA::route_row(*router, logits + row * router->num_experts, ids + row * router->top_k,
                                 weights + row * router->top_k);
    });
}
PENSTOCK_RECORDABLE(route)
