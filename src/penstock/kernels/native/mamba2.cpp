// Mamba2's selective state space with its convolution and gate (kernels/mamba2.py).
//
// The state of a head is a matrix [keys, size]. Sixteen columns of it are a Vec, so that no sum crosses lanes: a column is
// computed by itself, token after token, in ascending order of keys.
#include "activations.h"
#include "pool.h"
#include "recurrent.h"
#include "scratch.h"

namespace penstock::ISA {
namespace {

struct Mamba2 {
    const float* conv;     // [taps, channels]
    const float* bias;     // [channels]: of the convolution
    const float* decay;    // [heads]: exp(A_log)
    const float* dt_bias;  // [heads]
    const float* skip;     // [heads]: D
    // The first of the heads is number `offset` of its group, and a whole group has `group` heads.
    int64_t heads, groups, group, offset, size, keys, taps;

    int64_t inner() const { return heads * size; }
    int64_t channels() const { return inner() + 2 * groups * keys; }
    // Channels of a head: its values, then its group's keys and queries.
    int64_t unit() const { return size + 2 * keys; }
    // Numbers of a head's state: its matrix, then the history of its channels.
    int64_t head_size() const { return keys * size + (taps - 1) * unit(); }
    int64_t group_of(int64_t head) const { return (offset + head) / group; }
    int64_t first_head(int64_t number) const { return number ? number * group - offset : 0; }

    // The channel of a row that is number `i` of a head's channels.
    int64_t channel(int64_t head, int64_t i) const {
        if (i < size) return head * size + i;
        const int64_t place = group_of(head) * keys;
        return i < size + keys ? inner() + place + i - size : inner() + groups * keys + place + i - size - keys;
    }
};

thread_local Scratch memory;

template <class T>
class Mamba2Step {
public:
    Mamba2Step(const Mamba2& layer, const States& states, const T* given, T* pending, float* out, int64_t pending_stride)
        : layer_(layer), states_(states), given_(given), pending_(pending), out_(out), pending_stride_(pending_stride) {
        int64_t total = 0;
        for (int64_t request = 0; request < states.requests; ++request) total += Span(states, request).count;
        const int64_t numbers = total * (layer.channels() + 2 * layer.heads);
        firsts_ = reinterpret_cast<int64_t*>(memory.reserve(states.requests * sizeof(int64_t) + numbers * sizeof(float)));
        mixed_ = reinterpret_cast<float*>(firsts_ + states.requests);
        rates_ = mixed_ + total * layer.channels();
        total_ = 0;
        for (int64_t request = 0; request < states.requests; ++request) {
            firsts_[request] = total_;
            total_ += Span(states, request).count;
        }
    }

    void run(int64_t threads) {
        const Mamba2& layer = layer_;
        const int64_t requests = states_.requests, work = total_ / (requests ? requests : 1) + 1;
        run_each(requests * layer.heads, work * layer.unit() * 2, threads,
                 [&](int64_t item) { mix(item / layer.heads, item % layer.heads); });
        run_each(requests * layer.heads, work * layer.keys * layer.size / 4, threads,
                 [&](int64_t item) { recur(item / layer.heads, item % layer.heads); });
        if (!pending_) return;
        for (int64_t request = 0; request < requests; ++request) keep_drafts(request);
    }

    static constexpr int64_t kMostKeys = 256;
    static constexpr int64_t kMostHistory = 16384;

private:
    int64_t width() const { return layer_.inner() + layer_.channels() + layer_.heads; }
    int64_t pending_width() const { return layer_.heads * (layer_.unit() + 1); }

    // The inputs of token `t`: [channels], then dt of all heads.
    const T* inputs(const Span& span, int64_t request, int64_t t) const {
        if (t < span.pending) return pending_ + (states_.rows[request] * pending_stride_ + t) * pending_width();
        return given_ + (span.first_row + t - span.pending) * width() + layer_.inner();
    }

    // Convolves a head's channels, those of a group for its first head alone, and computes the head's rates.
    void mix(int64_t request, int64_t head) {
        const Mamba2& layer = layer_;
        const Span span(states_, request);
        if (span.is_empty()) return;
        const float* state = span.before();
        const float* history = state ? state + head * layer.head_size() + layer.keys * layer.size : nullptr;
        const Convolution convolution(layer.conv, layer.taps, layer.channels());
        const bool is_first = layer.first_head(layer.group_of(head)) == head;
        const Vec rate = splat(layer.decay[head] * -1.44269504f);
        // Token by token: neighbouring tokens of one channel would share a set of the first cache.
        for (int64_t t = 0; t < span.count; ++t) {
            float* const mixed = mixed_ + (firsts_[request] + t) * layer.channels();
            convolution.run(
                history, layer.unit(), t, is_first ? layer.unit() : layer.size,
                [&](int64_t token, int64_t i) { return load(inputs(span, request, token) + layer.channel(head, i)); },
                [&](int64_t i) { return layer.channel(head, i); },
                [&](int64_t i, Vec sum) {
                    const int64_t channel = layer.channel(head, i);
                    const Vec x = round_to<T>(sum + load(layer.bias + channel));
                    store(mixed + channel, round_to<T>(x / sigmoid_denominator(x)));
                });
            const Vec raw = load_first(inputs(span, request, t) + layer.channels() + head, 1);
            const Vec dt = softplus(raw + splat(layer.dt_bias[head]));
            float* to = rates_ + ((firsts_[request] + t) * layer.heads + head) * 2;
            to[0] = first_lane(dt);
            to[1] = first_lane(exp2(dt * rate));
        }
    }

    void recur(int64_t request, int64_t head) {
        const Mamba2& layer = layer_;
        const Span span(states_, request);
        if (span.is_empty()) return;
        int64_t column = 0;
        for (; column + 4 * kLanes <= layer.size; column += 4 * kLanes) scan<4>(span, request, head, column);
        for (; column < layer.size; column += kLanes) scan<1>(span, request, head, column);
        store_histories(span, request, head);
    }

    // Computes the columns of a head's state from `column` on, kVecs Vecs of them, token after token.
    template <int kVecs>
    void scan(const Span& span, int64_t request, int64_t head, int64_t column) {
        const Mamba2& layer = layer_;
        const int64_t place = head * layer.head_size() + column, group = layer.group_of(head);
        float matrix[kMostKeys * kVecs * kLanes];
        const float* before = span.before();
        for (int64_t k = 0; k < layer.keys; ++k)
            for (int v = 0; v < kVecs; ++v)
                store(matrix + (k * kVecs + v) * kLanes,
                      before ? load(before + place + k * layer.size + v * kLanes) : splat(0));
        for (int64_t t = 0; t < span.count; ++t) {
            const float* mixed = mixed_ + (firsts_[request] + t) * layer.channels();
            const float* x = mixed + head * layer.size + column;
            const float *key = mixed + layer.inner() + group * layer.keys, *query = key + layer.groups * layer.keys;
            const float* rates = rates_ + ((firsts_[request] + t) * layer.heads + head) * 2;
            const Vec dt = splat(rates[0]), decay = splat(rates[1]);
            Vec added[kVecs], read[kVecs];
            for (int v = 0; v < kVecs; ++v) {
                added[v] = load(x + v * kLanes) * dt;
                read[v] = splat(0);
            }
            for (int64_t k = 0; k < layer.keys; ++k) {
                const Vec stored = splat(key[k]), asked = splat(query[k]);
                for (int v = 0; v < kVecs; ++v) {
                    float* cell = matrix + (k * kVecs + v) * kLanes;
                    const Vec updated = fma(added[v], stored, load(cell) * decay);
                    store(cell, updated);
                    read[v] = fma(updated, asked, read[v]);
                }
            }
            if (t >= span.pending) {
                const int64_t row = span.first_row + t - span.pending, feature = head * layer.size + column;
                for (int v = 0; v < kVecs; ++v) {
                    const Vec y = round_to<T>(fma(load(x + v * kLanes), splat(layer.skip[head]), read[v]));
                    const Vec z = load(given_ + row * width() + feature + v * kLanes);
                    store(out_ + row * layer.inner() + feature + v * kLanes, y * (z / sigmoid_denominator(z)));
                }
            }
            if (float* after = span.after(t))
                for (int64_t k = 0; k < layer.keys; ++k)
                    for (int v = 0; v < kVecs; ++v)
                        store(after + place + k * layer.size + v * kLanes, load(matrix + (k * kVecs + v) * kLanes));
        }
    }

    void store_histories(const Span& span, int64_t request, int64_t head) const {
        const Mamba2& layer = layer_;
        const int64_t place = head * layer.head_size() + layer.keys * layer.size;
        // The block that is read may be the one that is written.
        float old[kMostHistory];
        const float* before = span.before();
        if (before) std::memcpy(old, before + place, (layer.taps - 1) * layer.unit() * sizeof(float));
        for (int64_t t = 0; t < span.count - span.drafts; ++t) {
            float* after = span.after(t);
            if (!after) continue;
            store_history(before ? old : nullptr, after + place, layer.taps, layer.unit(), t, [&](float* to, int64_t token) {
                const T* from = inputs(span, request, token);
                for (int64_t i = 0; i < layer.unit(); i += kLanes) store(to + i, load(from + layer.channel(head, i)));
            });
        }
    }

    // Keeps the inputs of the drafts: the next step begins with those that were accepted.
    void keep_drafts(int64_t request) {
        const Span span(states_, request);
        if (span.is_empty()) return;
        T* to = pending_ + states_.rows[request] * pending_stride_ * pending_width();
        for (int64_t t = span.count - span.drafts; t < span.count; ++t, to += pending_width())
            std::memcpy(to, inputs(span, request, t), (layer_.channels() + layer_.heads) * sizeof(T));
    }

    const Mamba2& layer_;
    const States& states_;
    const T* given_;
    T* pending_;
    float* out_;
    const int64_t pending_stride_;
    float *mixed_, *rates_;
    int64_t* firsts_;
    int64_t total_;
};

}  // namespace
}  // namespace penstock::ISA

using namespace penstock::ISA;

// See kernels/mamba2.py. `given` is [rows, inner + channels + heads], `pending` [rows, pending_stride, heads * (unit + 1)]
// or null, `out` [rows, inner].
PENSTOCK_EXPORT(void, mamba2)
(const void* layer, const void* given, void* pending, float* out, float* memory, const int32_t* table, int64_t table_stride,
 const int32_t* query_start_loc, const int32_t* seq_lens, const int64_t* rows, const int32_t* num_pending,
 const int32_t* num_drafts, int64_t requests, int64_t block_size, int64_t pending_stride, int64_t threads, int32_t dtype) {
    const Mamba2& sizes = *static_cast<const Mamba2*>(layer);
    const States states{memory,   table,      table_stride, query_start_loc, seq_lens, requests,
                        block_size, sizes.heads * sizes.head_size(), rows, num_pending, num_drafts};
#define CALL(T) \
    Mamba2Step<T>(sizes, states, static_cast<const T*>(given), static_cast<T*>(pending), out, pending_stride).run(threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(mamba2)
