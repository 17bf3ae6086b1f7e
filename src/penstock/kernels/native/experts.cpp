// The grouped products of a mixture of experts (kernels/experts.py). Rows are sorted by slot, and the rows of a slot are
// multiplied by its weights panel by panel, with the tiles of linear layers: so an element is what a layer computes.
//
// The work of a call is a list of tasks: some panels of one slot, for all rows of the slot. Threads take one task after
// another. A slot with much work has many tasks, so that one expert with most of the rows keeps all threads busy.
#include "activations.h"
#include "linear_kernels.h"

namespace {

constexpr int64_t kClampedSwiglu = 1, kGeluTanh = 2, kSquaredRelu = 3;  // places in ACTIVATIONS of kernels/experts.py

// The weights as described in kernels/experts.py. A slot of `gate_up` is a panel of gate, the panel of up for the same
// features, and so on; biases of a slot are those of gate, then those of up. Experts without a gate have up alone.
struct Experts {
    const char* gate_up;
    const char* down;
    const float* gate_up_bias;  // [num_slots, halves, own_inner] or null
    const float* down_bias;     // [num_slots, out_features] or null
    int64_t num_slots;
    int64_t in_features;
    int64_t own_inner;
    int64_t inner;
    int64_t out_features;
    int64_t dtype;
    int64_t activation;
    const Quantization* gate_up_quantization;  // or null
    const Quantization* down_quantization;

    // Panels of `gate_up` that make one panel of activated features.
    int64_t halves() const { return activation == kSquaredRelu ? 1 : 2; }
};

// The type under which vec.h stores what a kernel stores.
template <class Element>
struct Stored {
    using Type = Element;
};
template <>
struct Stored<uint16_t> {
    using Type = penstock::ISA::bf16;
};

struct Task {
    int64_t slot;
    int64_t row, rows;  // of the sorted rows
    Range units;        // of the slot's panels, or pairs of panels
};

// Tasks per thread: so many that a thread that starts late or loses its core leaves most of its share to the others.
constexpr int64_t kTasksPerThread = 16;

thread_local Scratch task_memory;

struct Tasks {
    Task* list;
    int64_t count;
    int64_t threads;  // that the work justifies
};

// Divides the work of all slots, each with `units` parts of `unit_weights` weights.
Tasks divide(const int32_t* starts, int64_t num_slots, int64_t units, int64_t unit_weights, int64_t threads) {
    int64_t weight = 0, nanoseconds = 0;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
        const int64_t rows = starts[slot + 1] - starts[slot];
        weight += rows ? rows + 4 : 0;
        nanoseconds += rows ? product_nanoseconds(units * unit_weights, rows) : 0;
    }
    threads = penstock_useful_threads(nanoseconds, threads);
    const int64_t wanted = threads > 1 ? threads * kTasksPerThread : 1;
    Tasks tasks{reinterpret_cast<Task*>(task_memory.reserve((num_slots + wanted) * sizeof(Task))), 0, threads};
    for (int64_t slot = 0; slot < num_slots; ++slot) {
        const int64_t rows = starts[slot + 1] - starts[slot];
        if (rows == 0) continue;
        const int64_t parts = smaller(units, divide_up((rows + 4) * wanted, weight));
        for (int64_t part = 0; part < parts; ++part)
            tasks.list[tasks.count++] = {slot, starts[slot], rows, part_of(units, part, parts)};
    }
    return tasks;
}

template <class Run>
void run_tasks(const Tasks& tasks, const Run& run) {
    run_parts(tasks.count, tasks.threads, [&](int64_t task) { run(tasks.list[task]); });
}

// Calls run(first, count) for the rows of a task, as many at a time as stay in the cache.
template <class Kernel, class Run>
void in_cached_rows(const Task& task, int64_t k, const Run& run) {
    const int64_t most = most_rows<Kernel>(k);
    typename Kernel::Session session(task.rows);
    for (int64_t first = 0; first < task.rows; first += most) run(task.row + first, smaller(most, task.rows - first));
}

// Activates the products `gate_up`, [rows, halves, kPanel], into `columns` columns of out.
template <class T>
void activate(const char* gate_up, char* out, int64_t out_stride, int64_t rows, int64_t columns, const Experts& experts) {
    const int64_t activation = experts.activation;
    // The tiles stored the products under another type.
    asm volatile("" : : : "memory");
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = reinterpret_cast<const T*>(gate_up) + row * experts.halves() * kPanel;
        T* to = reinterpret_cast<T*>(out + row * out_stride);
        if (activation == kSquaredRelu)
            penstock::ISA::squared_relu_row(gate, to, columns);
        else if (activation == kClampedSwiglu)
            penstock::ISA::clamped_swiglu_row(gate, gate + kPanel, to, columns);
        else if (activation == kGeluTanh)
            penstock::ISA::gelu_tanh_and_mul_row(gate, gate + kPanel, to, columns);
        else
            penstock::ISA::silu_and_mul_row(gate, gate + kPanel, to, columns);
    }
}

// Packs the rows of x of sorted rows: those of their pairs' tokens.
template <class Kernel>
void pack_pairs(Blocks<Kernel>& blocks, const char* x, const int32_t* pairs, int64_t top_k, char* gathered) {
    const int64_t row_bytes = blocks.k * static_cast<int64_t>(sizeof(typename Kernel::Element));
    for (int64_t block = 0; block < blocks.count; ++block) {
        const int32_t* own = pairs + blocks.first(block);
        const int64_t rows = blocks.height_of(block);
        if (rows > 1)
            for (int64_t row = 0; row < rows; ++row)
                memcpy(gathered + row * row_bytes, x + own[row] / top_k * row_bytes, row_bytes);
        blocks.pack(block, rows > 1 ? gathered : x + own[0] / top_k * row_bytes);
    }
}

// The activated features of some pairs of panels for some sorted rows.
template <class Kernel>
void gate_up_rows(const Experts& experts, const Task& task, const char* x, const int32_t* pairs, int64_t top_k, char* out,
                  int64_t row, int64_t rows) {
    using Element = typename Kernel::Element;
    constexpr int64_t kElement = sizeof(Element);
    const int64_t halves = experts.halves();
    Blocks<Kernel> blocks(rows, experts.in_features);
    const int64_t products_bytes = rows * halves * kPanel * kElement;
    const int64_t gathered_bytes = Kernel::kRows * experts.in_features * kElement;
    blocks.packed = scratch.reserve(blocks.size() + products_bytes + gathered_bytes);
    char* products = blocks.packed + blocks.size();
    pack_pairs(blocks, x, pairs + row, top_k, products + products_bytes);
    const int64_t bytes = panel_bytes<Kernel>(experts.gate_up_quantization, experts.in_features);
    const int64_t num_pairs = divide_up(experts.own_inner, kPanel), stride = experts.own_inner * kElement;
    const float* bias = experts.gate_up_bias ? experts.gate_up_bias + task.slot * halves * experts.own_inner : nullptr;
    for (int64_t pair = task.units.begin; pair < task.units.end; ++pair) {
        const char* weight = experts.gate_up + (task.slot * num_pairs + pair) * halves * bytes;
        const int64_t column = pair * kPanel, columns = smaller(kPanel, experts.own_inner - column);
        multiply_panels(blocks, experts.gate_up_quantization, weight, halves, pair + 1 < task.units.end, [&](int64_t half) {
            Tile<Element> tile{};
            tile.out_stride = halves * kPanel * kElement;
            tile.columns = columns;
            tile.bias = bias ? bias + half * experts.own_inner + column : nullptr;
            tile.out = products + half * kPanel * kElement;
            return tile;
        });
        activate<typename Stored<Element>::Type>(products, out + row * stride + column * kElement, stride, rows, columns,
                                                 experts);
    }
}

template <class Kernel>
void down_rows(const Experts& experts, const Task& task, const char* activated, char* out, int64_t row, int64_t rows) {
    using Element = typename Kernel::Element;
    constexpr int64_t kElement = sizeof(Element);
    Blocks<Kernel> blocks(rows, experts.inner);
    blocks.packed = scratch.reserve(blocks.size());
    for (int64_t block = 0; block < blocks.count; ++block)
        blocks.pack(block, activated + (row + blocks.first(block)) * experts.inner * kElement);
    const Quantization* quantization = experts.down_quantization;
    const int64_t bytes = panel_bytes<Kernel>(quantization, experts.inner);
    const int64_t num_panels = divide_up(experts.out_features, kPanel);
    const float* bias = experts.down_bias ? experts.down_bias + task.slot * experts.out_features : nullptr;
    const char* weight = experts.down + (task.slot * num_panels + task.units.begin) * bytes;
    multiply_panels(blocks, quantization, weight, task.units.end - task.units.begin, false, [&](int64_t number) {
        const int64_t column = (task.units.begin + number) * kPanel;
        Tile<Element> tile{};
        tile.out_stride = experts.out_features * kElement;
        tile.bias = bias ? bias + column : nullptr;
        tile.out = out + row * tile.out_stride + column * kElement;
        tile.columns = smaller(kPanel, experts.out_features - column);
        return tile;
    });
}

}  // namespace

namespace penstock::ISA {
namespace {

template <class T>
void combine(const void* outputs, const int32_t* rows, const float* weights, void* out, int64_t tokens, int64_t top_k,
             int64_t width, int64_t threads) {
    run_each(tokens, width * top_k, threads, [&](int64_t token) {
        T* to = static_cast<T*>(out) + token * width;
        for (int64_t i = 0; i < width; i += kLanes) {
            Vec total = splat(0);
            for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
                const T* from = static_cast<const T*>(outputs) + rows[choice] * width;
                total = fma(splat(weights[choice]), load_first(from + i, width - i), total);
            }
            store_first(to + i, total, width - i);
        }
    });
}

}  // namespace
}  // namespace penstock::ISA

// Sorts pairs by slot: ids [num_pairs], slots [num_experts], -1 for an expert in no slot -> pairs [num_pairs], rows
// [num_pairs], starts [num_slots + 1] (`Groups` in kernels/experts.py).
PENSTOCK_EXPORT(void, experts_group)
(const int64_t* ids, const int32_t* slots, int32_t* pairs, int32_t* rows, int32_t* starts, int64_t num_pairs,
 int64_t num_slots) {
    memset(starts, 0, (num_slots + 1) * sizeof(int32_t));
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const int32_t slot = slots[ids[pair]];
        if (slot >= 0) ++starts[slot + 1];
    }
    for (int64_t slot = 0; slot < num_slots; ++slot) starts[slot + 1] += starts[slot];
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const int32_t slot = slots[ids[pair]];
        rows[pair] = slot < 0 ? -1 : starts[slot]++;
        if (slot >= 0) pairs[rows[pair]] = static_cast<int32_t>(pair);
    }
    // Every start has become the next slot's.
    for (int64_t slot = num_slots; slot > 0; --slot) starts[slot] = starts[slot - 1];
    starts[0] = 0;
}
PENSTOCK_RECORDABLE(experts_group)

// out [num_pairs, own_inner] = the activated features of x [tokens, in_features].
PENSTOCK_EXPORT(void, experts_gate_up)
(const Experts* experts, const void* x, const int32_t* pairs, const int32_t* starts, void* out, int64_t top_k,
 int64_t threads) {
    const int64_t units = divide_up(experts->own_inner, kPanel);
    const Tasks tasks = divide(starts, experts->num_slots, units, experts->in_features * experts->halves() * kPanel, threads);
    with_kernel(experts->dtype, experts->gate_up_quantization, [&](auto kernel) {
        using Kernel = decltype(kernel);
        run_tasks(tasks, [&](const Task& task) {
            in_cached_rows<Kernel>(task, experts->in_features, [&](int64_t row, int64_t rows) {
                gate_up_rows<Kernel>(*experts, task, static_cast<const char*>(x), pairs, top_k, static_cast<char*>(out),
                                     row, rows);
            });
        });
    });
}
PENSTOCK_RECORDABLE(experts_gate_up)

// out [num_pairs, out_features] = the experts' outputs of activated [num_pairs, inner].
PENSTOCK_EXPORT(void, experts_down)
(const Experts* experts, const void* activated, const int32_t* starts, void* out, int64_t threads) {
    const int64_t units = divide_up(experts->out_features, kPanel);
    const Tasks tasks = divide(starts, experts->num_slots, units, experts->inner * kPanel, threads);
    with_kernel(experts->dtype, experts->down_quantization, [&](auto kernel) {
        using Kernel = decltype(kernel);
        run_tasks(tasks, [&](const Task& task) {
            in_cached_rows<Kernel>(task, experts->inner, [&](int64_t row, int64_t rows) {
                down_rows<Kernel>(*experts, task, static_cast<const char*>(activated), static_cast<char*>(out), row,
                                  rows);
            });
        });
    });
}
PENSTOCK_RECORDABLE(experts_down)

// out [tokens, width] = the sums of the outputs at `rows` [tokens, top_k] by weights [tokens, top_k].
PENSTOCK_EXPORT(void, experts_combine)
(const void* outputs, const int32_t* rows, const float* weights, void* out, int64_t tokens, int64_t top_k, int64_t width,
 int64_t threads, int32_t dtype) {
    using namespace penstock::ISA;
#define CALL(T) combine<T>(outputs, rows, weights, out, tokens, top_k, width, threads)
    switch (dtype) {
        case kFloat32: return CALL(float);
        case kBFloat16: return CALL(bf16);
        case kFloat16: return CALL(f16);
    }
#undef CALL
}
PENSTOCK_RECORDABLE(experts_combine)
