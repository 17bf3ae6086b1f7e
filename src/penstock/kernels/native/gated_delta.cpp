// The gated delta rule with its convolution, gates and norm (kernels/gated_delta.py).
//
// The state of a value head is a matrix [key_size, value_size]. Sixteen columns of it are a Vec, so that no sum crosses
// lanes: a column is computed by itself, token after token, in ascending order of keys.
#include <cmath>

#include "activations.h"
#include "pool.h"
#include "recurrent.h"
#include "scratch.h"

namespace penstock::ISA {
namespace {

struct GatedDelta {
    const float* conv;     // [taps, channels]
    const float* decay;    // [value_heads]: exp(A_log)
    const float* dt_bias;  // [value_heads]
    const float* norm;     // [value_size]
    int64_t key_heads, value_heads, key_size, value_size, taps;
    float eps;

    int64_t group() const { return value_heads / key_heads; }  // value heads of a key head
    int64_t channels() const { return key_heads * unit(); }
    // Channels of a key head: its query, its key and its values.
    int64_t unit() const { return 2 * key_size + group() * value_size; }
    int64_t matrix_size() const { return key_size * value_size; }
    int64_t gates() const { return 2 * value_heads; }
    // Numbers of a key head's state: its matrices, then the history of its channels.
    int64_t head_size() const { return group() * matrix_size() + (taps - 1) * unit(); }

    // The channel of a row that is number `i` of a key head's channels.
    int64_t channel(int64_t head, int64_t i) const {
        if (i < key_size) return head * key_size + i;
        if (i < 2 * key_size) return (key_heads + head) * key_size + i - key_size;
        return 2 * key_heads * key_size + head * group() * value_size + i - 2 * key_size;
    }
};

thread_local Scratch memory;

template <class T>
class GatedDeltaStep {
public:
    GatedDeltaStep(const GatedDelta& layer, const States& states, const T* qkv, const T* gates, T* pending, T* out,
                   int64_t pending_stride, int64_t threads)
        : layer_(layer), states_(states), qkv_(qkv), gates_(gates), pending_(pending), out_(out),
          pending_stride_(pending_stride), threads_(threads), value_blocks_(layer.value_size / kLanes) {
        int64_t total = 0;
        for (int64_t request = 0; request < states.requests; ++request) total += Span(states, request).count;
        const int64_t mixed = total * layer.channels(), rates = total * layer.gates();
        const int64_t rows = states.query_start_loc[states.requests], width = layer.value_heads * layer.value_size;
        firsts_ = reinterpret_cast<int64_t*>(memory.reserve(states.requests * 8 + (mixed + rates + rows * width) * 4));
        mixed_ = reinterpret_cast<float*>(firsts_ + states.requests);
        rates_ = mixed_ + mixed;
        read_ = rates_ + rates;
        total = 0;
        for (int64_t request = 0; request < states.requests; ++request) {
            firsts_[request] = total;
            total += Span(states, request).count;
        }
        total_ = total;
    }

    void run() {
        const GatedDelta& layer = layer_;
        const int64_t requests = states_.requests, work = total_ / (requests ? requests : 1);
        run_each(requests * layer.key_heads, work * layer.unit() * 2, threads_, [&](int64_t item) {
            mix(item / layer.key_heads, item % layer.key_heads);
        });
        run_each(requests * layer.value_heads, layer.matrix_size() / 4 * (work + 1), threads_, [&](int64_t item) {
            recur(item / layer.value_heads, item % layer.value_heads);
        });
        const int64_t rows = states_.query_start_loc[requests];
        run_each(rows, layer.value_heads * layer.value_size, threads_, [&](int64_t row) {
            for (int64_t head = 0; head < layer.value_heads; ++head) gate(row, head);
        });
        if (!pending_) return;
        for (int64_t request = 0; request < requests; ++request) keep_drafts(request);
    }

private:
    // The inputs of token `t`: [channels], then the gates [value_size of all heads, beta, dt].
    const T* inputs(const Span& span, int64_t request, int64_t t) const {
        if (t < span.pending) return pending_ + (states_.rows[request] * pending_stride_ + t) * pending_width();
        return qkv_ + (span.first_row + t - span.pending) * layer_.channels();
    }
    const T* rates_of(const Span& span, int64_t request, int64_t t) const {
        if (t < span.pending) return inputs(span, request, t) + layer_.channels();
        return gates_ + (span.first_row + t - span.pending) * gate_width() + layer_.value_heads * layer_.value_size;
    }
    int64_t gate_width() const { return layer_.value_heads * layer_.value_size + layer_.gates(); }
    int64_t pending_width() const { return layer_.channels() + layer_.gates(); }

    // The channels of a key head, [tokens, unit]: what was mixed for the request.
    float* mixed_of(const Span& span, int64_t request, int64_t key_head) const {
        return mixed_ + firsts_[request] * layer_.channels() + key_head * span.count * layer_.unit();
    }

    // Convolves a key head's channels, normalizes its query and key, and computes the gates of its value heads.
    void mix(int64_t request, int64_t head) {
        const GatedDelta& layer = layer_;
        const Span span(states_, request);
        if (span.is_empty()) return;
        float* const mixed = mixed_of(span, request, head);
        const float* state = span.before();
        const float* history = state ? state + head * layer.head_size() + layer.group() * layer.matrix_size() : nullptr;
        const Convolution convolution(layer.conv, layer.taps, layer.channels());
        const float scale = 1.0f / std::sqrt(static_cast<float>(layer.key_size));
        // Token by token: neighbouring tokens of one channel would share a set of the first cache.
        for (int64_t t = 0; t < span.count; ++t) {
            float* query = mixed + t * layer.unit();
            if (t + kAhead < span.count)
                for (int64_t i = 0; i < layer.unit(); i += kLanes)
                    __builtin_prefetch(inputs(span, request, t + kAhead) + layer.channel(head, i));
            convolution.run(
                history, layer.unit(), t, layer.unit(),
                [&](int64_t token, int64_t i) { return load(inputs(span, request, token) + layer.channel(head, i)); },
                [&](int64_t i) { return layer.channel(head, i); },
                [&](int64_t i, Vec sum) {
                    const Vec x = round_to<T>(sum);
                    store(query + i, round_to<T>(x / sigmoid_denominator(x)));
                });
            normalize(query, scale);
            normalize(query + layer.key_size, 1.0f);
            compute_gates(rates_of(span, request, t), rates_ + (firsts_[request] + t) * layer.gates(), head);
        }
    }

    void normalize(float* x, float scale) const {
        Vec squares = splat(0);
        for (int64_t i = 0; i < layer_.key_size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
        const Vec factor = splat(scale / std::sqrt(sum(squares) + 1e-6f));
        for (int64_t i = 0; i < layer_.key_size; i += kLanes) store(x + i, load(x + i) * factor);
    }

    // Of the value heads of a key head: the share of an update, and the factor of the state.
    void compute_gates(const T* rates, float* out, int64_t key_head) const {
        const int64_t heads = layer_.value_heads, first = key_head * layer_.group();
        for (int64_t i = first; i < first + layer_.group(); i += kLanes) {
            const int64_t count = first + layer_.group() - i;
            const Vec share = splat(1) / sigmoid_denominator(load_first(rates + i, count));
            store_first(out + i, round_to<T>(share), count);
            const Vec dt = softplus(load_first(rates + heads + i, count) + load_first(layer_.dt_bias + i, count));
            const Vec decay = load_first(layer_.decay + i, count) * dt;
            store_first(out + heads + i, exp2(decay * splat(-1.44269504f)), count);
        }
    }

    // Runs the request's tokens over a value head's matrix.
    void recur(int64_t request, int64_t head) {
        const Span span(states_, request);
        if (span.is_empty()) return;
        const int64_t key_head = head / layer_.group(), within = head % layer_.group();
        const int64_t place = key_head * layer_.head_size() + within * layer_.matrix_size();
        const float* before = span.before();
        if (within == 0) store_histories(span, request, key_head, before);
        for (int64_t block = 0; block < value_blocks_;) {
            const int64_t width = value_blocks_ - block >= 4 ? 4 : value_blocks_ - block >= 2 ? 2 : 1;
            const int64_t column = block * kLanes;
            if (width == 4) recur_columns<4>(span, request, head, place, column, before);
            if (width == 2) recur_columns<2>(span, request, head, place, column, before);
            if (width == 1) recur_columns<1>(span, request, head, place, column, before);
            block += width;
        }
    }

    // Of kVecs * 16 columns.
    template <int kVecs>
    void recur_columns(const Span& span, int64_t request, int64_t head, int64_t place, int64_t column, const float* before) {
        const GatedDelta& layer = layer_;
        const int64_t keys = layer.key_size, values = layer.value_size, key_head = head / layer.group();
        alignas(64) float matrix[kMostKeys * kVecs * kLanes];
        copy_columns<kVecs>(matrix, kVecs * kLanes, before ? before + place + column : nullptr, values);
        const float* mixed = mixed_of(span, request, key_head);
        const float* rates = rates_ + firsts_[request] * layer.gates() + head;
        const int64_t value_place = 2 * keys + head % layer.group() * values + column;
        Columns<kVecs> found = decay<kVecs>(matrix, mixed + keys, rates[layer.value_heads]);
        for (int64_t t = 0; t < span.count; ++t, mixed += layer.unit(), rates += layer.gates()) {
            const float *query = mixed, *key = mixed + keys, *value = mixed + value_place;
            for (int v = 0; v < kVecs; ++v) found.of[v] = (load(value + v * kLanes) - found.of[v]) * splat(rates[0]);
            float* out = nullptr;
            if (t >= span.pending)
                out = read_ + ((span.first_row + t - span.pending) * layer.value_heads + head) * values + column;
            float* const after = span.after(t);
            const bool is_last = t + 1 == span.count;
            const float *next_key = key + layer.unit(), *next_rates = rates + layer.gates();
            // The next token begins on the way, unless the state between the two is needed.
            if (!after && !is_last) {
                found = update<kVecs, true>(matrix, query, key, found, out, next_key, next_rates[layer.value_heads]);
                continue;
            }
            update<kVecs, false>(matrix, query, key, found, out, nullptr, 0);
            for (int64_t k = 0; after && k < keys; ++k)
                for (int v = 0; v < kVecs; ++v)
                    store(after + place + column + k * values + v * kLanes, load(matrix + (k * kVecs + v) * kLanes));
            if (!is_last) found = decay<kVecs>(matrix, next_key, next_rates[layer.value_heads]);
        }
    }

    template <int kVecs>
    struct Columns {
        Vec of[kVecs];
    };

    // The first half of a token: the matrix times its factor. Returns what that holds of the key.
    template <int kVecs>
    Columns<kVecs> decay(float* matrix, const float* key, float factor) const {
        Columns<kVecs> found;
        for (int v = 0; v < kVecs; ++v) found.of[v] = splat(0);
        for (int64_t k = 0; k < layer_.key_size; ++k)
            for (int v = 0; v < kVecs; ++v) {
                float* cell = matrix + (k * kVecs + v) * kLanes;
                found.of[v] = decay_cell(cell, load(cell), splat(factor), splat(key[k]), found.of[v]);
            }
        return found;
    }

    // The second half: adds `change` at the key and stores what the result holds of the query in `out`. With kDecays also
    // the first half of the next token, whose key and factor are given.
    template <int kVecs, bool kDecays>
    Columns<kVecs> update(float* matrix, const float* query, const float* key, const Columns<kVecs>& change, float* out,
                          const float* next_key, float factor) const {
        const Columns<kVecs> added = change;
        Columns<kVecs> read, found;
        for (int v = 0; v < kVecs; ++v) found.of[v] = read.of[v] = splat(0);
        for (int64_t k = 0; k < layer_.key_size; ++k)
            for (int v = 0; v < kVecs; ++v) {
                float* cell = matrix + (k * kVecs + v) * kLanes;
                const Vec updated = fma(splat(key[k]), added.of[v], load(cell));
                read.of[v] = fma(updated, splat(query[k]), read.of[v]);
                if constexpr (kDecays)
                    found.of[v] = decay_cell(cell, updated, splat(factor), splat(next_key[k]), found.of[v]);
                else
                    store(cell, updated);
            }
        if (out)
            for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, read.of[v]);
        return found;
    }

    // Stores x times the factor, and adds its product with the key to `found`.
    static PENSTOCK_INLINE Vec decay_cell(float* cell, Vec x, Vec factor, Vec key, Vec found) {
        const Vec kept = x * factor;
        store(cell, kept);
        return fma(kept, key, found);
    }

    // [key_size] rows of kVecs Vecs; zeros from null.
    template <int kVecs>
    void copy_columns(float* to, int64_t stride, const float* from, int64_t from_stride) const {
        for (int64_t k = 0; k < layer_.key_size; ++k)
            for (int v = 0; v < kVecs; ++v)
                store(to + k * stride + v * kLanes, from ? load(from + k * from_stride + v * kLanes) : splat(0));
    }

    void store_histories(const Span& span, int64_t request, int64_t key_head, const float* before) const {
        const GatedDelta& layer = layer_;
        const int64_t place = key_head * layer.head_size() + layer.group() * layer.matrix_size();
        const int64_t size = (layer.taps - 1) * layer.unit();
        // The block that is read may be the one that is written.
        float old[kMostHistory];
        if (before) std::memcpy(old, before + place, size * sizeof(float));
        for (int64_t t = 0; t < span.count - span.drafts; ++t) {
            float* after = span.after(t);
            if (!after) continue;
            store_history(before ? old : nullptr, after + place, layer.taps, layer.unit(), t, [&](float* to, int64_t token) {
                const T* from = inputs(span, request, token);
                for (int64_t i = 0; i < layer.unit(); i += kLanes) store(to + i, load(from + layer.channel(key_head, i)));
            });
        }
    }

    // The head's result of a row, normalized, times silu of its gate.
    void gate(int64_t row, int64_t head) {
        const int64_t size = layer_.value_size;
        float* x = read_ + (row * layer_.value_heads + head) * size;
        const T* gates = gates_ + row * gate_width() + head * size;
        T* out = out_ + (row * layer_.value_heads + head) * size;
        Vec squares = splat(0);
        for (int64_t i = 0; i < size; i += kLanes) {
            const Vec rounded = round_to<T>(load(x + i));
            store(x + i, rounded);
            squares = fma(rounded, rounded, squares);
        }
        const Vec inverse = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + layer_.eps));
        for (int64_t i = 0; i < size; i += kLanes) {
            const Vec normed = round_to<T>(round_to<T>(load(x + i) * inverse) * load(layer_.norm + i));
            const Vec z = load(gates + i);
            store(out + i, normed * (z / sigmoid_denominator(z)));
        }
    }

    // Keeps the inputs of the drafts: the next step begins with those that were accepted.
    void keep_drafts(int64_t request) {
        const Span span(states_, request);
        if (span.is_empty()) return;
        T* to = pending_ + states_.rows[request] * pending_stride_ * pending_width();
        for (int64_t t = span.count - span.drafts; t < span.count; ++t, to += pending_width()) {
            std::memcpy(to, inputs(span, request, t), layer_.channels() * sizeof(T));
            std::memcpy(to + layer_.channels(), rates_of(span, request, t), layer_.gates() * sizeof(T));
        }
    }

    static constexpr int64_t kMostKeys = 256;
    static constexpr int64_t kAhead = 4;  // tokens
    static constexpr int64_t kMostHistory = 16384;

    const GatedDelta& layer_;
    const States& states_;
    const T *qkv_, *gates_;
    T *pending_, *out_;
    const int64_t pending_stride_, threads_, value_blocks_;
    float *mixed_, *rates_, *read_;
    int64_t* firsts_;
    int64_t total_;
};

}  // namespace
}  // namespace penstock::ISA

using namespace penstock::ISA;

// See kernels/gated_delta.py. `pending` is [rows, pending_stride, channels + gates] or null.
PENSTOCK_EXPORT(void, gated_delta)
(const void* layer, const void* qkv, const void* gates, void* pending, void* out, float* memory, const int32_t* table,
 int64_t table_stride, const int32_t* query_start_loc, const int32_t* seq_lens, const int64_t* rows,
 const int32_t* num_pending, const int32_t* num_drafts, int64_t requests, int64_t block_size, int64_t pending_stride,
 int64_t threads, int32_t dtype) {
    const GatedDelta& sizes = *static_cast<const GatedDelta*>(layer);
    const States states{memory,     table, table_stride, query_start_loc, seq_lens, requests, block_size, sizes.key_heads * sizes.head_size(),
                        rows, num_pending,  num_drafts};
#define CALL(T)                                                                                                    \
    GatedDeltaStep<T>(sizes, states, static_cast<const T*>(qkv), static_cast<const T*>(gates),                     \
                      static_cast<T*>(pending), static_cast<T*>(out), pending_stride, threads).run()
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(gated_delta)
