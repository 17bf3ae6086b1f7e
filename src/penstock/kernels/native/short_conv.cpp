// The gated short convolution (kernels/short_conv.py).
#include "pool.h"
#include "recurrent.h"

namespace penstock::ISA {
namespace {

struct ShortConv {
    const float* conv;  // [taps, channels]
    int64_t heads, width, taps;

    int64_t channels() const { return heads * width; }
    // Numbers of a head's state: the last inputs of its channels.
    int64_t head_size() const { return (taps - 1) * width; }
};

template <class T>
class ShortConvStep {
public:
    ShortConvStep(const ShortConv& layer, const States& states, const T* bcx, T* pending, T* out, int64_t pending_stride)
        : layer_(layer), states_(states), bcx_(bcx), pending_(pending), out_(out), pending_stride_(pending_stride) {}

    void run(int64_t threads) const {
        const int64_t requests = states_.requests, rows = states_.query_start_loc[requests];
        const int64_t work = (rows / (requests ? requests : 1) + 1) * layer_.width;
        run_each(requests * layer_.heads, work, threads,
                 [&](int64_t item) { convolve(item / layer_.heads, item % layer_.heads); });
        if (!pending_) return;
        for (int64_t request = 0; request < requests; ++request) keep_drafts(request);
    }

    static constexpr int64_t kMostHistory = 1024;

private:
    // The inputs of the convolution at token `t`, sixteen channels from `channel` on.
    PENSTOCK_INLINE Vec input(const Span& span, int64_t request, int64_t t, int64_t channel) const {
        if (t < span.pending) return load(draft(request, t) + channel);
        const T* row = bcx_ + (span.first_row + t - span.pending) * 3 * layer_.channels() + channel;
        return round_to<T>(load(row) * load(row + 2 * layer_.channels()));
    }

    T* draft(int64_t request, int64_t t) const {
        return pending_ + (states_.rows[request] * pending_stride_ + t) * layer_.channels();
    }

    void convolve(int64_t request, int64_t head) const {
        const ShortConv& layer = layer_;
        const Span span(states_, request);
        if (span.is_empty()) return;
        // The block that is read may be the one that is written.
        float old[kMostHistory];
        const float* before = span.before();
        if (before) std::memcpy(old, before + head * layer.head_size(), layer.head_size() * sizeof(float));
        const float* history = before ? old : nullptr;
        const Convolution convolution(layer.conv, layer.taps, layer.channels());
        const int64_t first = head * layer.width;
        for (int64_t t = span.pending; t < span.count; ++t) {
            const int64_t row = span.first_row + t - span.pending;
            convolution.run(
                history, layer.width, t, layer.width,
                [&](int64_t token, int64_t i) { return input(span, request, token, first + i); },
                [&](int64_t i) { return first + i; },
                [&](int64_t i, Vec sum) {
                    const Vec gate = load(bcx_ + (row * 3 + 1) * layer.channels() + first + i);
                    store(out_ + row * layer.channels() + first + i, gate * round_to<T>(sum));
                });
        }
        for (int64_t t = 0; t < span.count - span.drafts; ++t) {
            float* after = span.after(t);
            if (!after) continue;
            store_history(history, after + head * layer.head_size(), layer.taps, layer.width, t, [&](float* to, int64_t token) {
                for (int64_t i = 0; i < layer.width; i += kLanes)
                    store(to + i, input(span, request, token, first + i));
            });
        }
    }

    // Keeps the inputs of the drafts: the next step begins with those that were accepted.
    void keep_drafts(int64_t request) const {
        const Span span(states_, request);
        if (span.is_empty()) return;
        for (int64_t i = 0; i < span.drafts; ++i)
            for (int64_t channel = 0; channel < layer_.channels(); channel += kLanes)
                store(draft(request, i) + channel, input(span, request, span.count - span.drafts + i, channel));
    }

    const ShortConv& layer_;
    const States& states_;
    const T* bcx_;
    T *pending_, *out_;
    const int64_t pending_stride_;
};

}  // namespace
}  // namespace penstock::ISA

using namespace penstock::ISA;

// See kernels/short_conv.py. `bcx` is [rows, 3, channels], `pending` [requests' places, pending_stride, channels] or null.
PENSTOCK_EXPORT(void, short_conv)
(const void* layer, const void* bcx, void* pending, void* out, float* memory, const int32_t* table, int64_t table_stride,
 const int32_t* query_start_loc, const int32_t* seq_lens, const int64_t* rows, const int32_t* num_pending,
 const int32_t* num_drafts, int64_t requests, int64_t block_size, int64_t pending_stride, int64_t threads, int32_t dtype) {
    const ShortConv& sizes = *static_cast<const ShortConv*>(layer);
    const States states{memory,   table,      table_stride, query_start_loc, seq_lens, requests,
                        block_size, sizes.heads * sizes.head_size(), rows, num_pending, num_drafts};
#define CALL(T)                                                                                                      \
    ShortConvStep<T>(sizes, states, static_cast<const T*>(bcx), static_cast<T*>(pending), static_cast<T*>(out),      \
                     pending_stride)                                                                                 \
        .run(threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(short_conv)
