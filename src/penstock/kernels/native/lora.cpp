// Adds the adapters of a layer to its output (kernels/lora.py).
#include "pool.h"
#include "vec.h"

namespace penstock::ISA {
namespace {

// The outputs of one adapter in blocks of kLanes. A block depends on some neighbouring ranks only: in a layer that has
// several projections, on those of its own.
struct Block {
    int64_t first, end;  // ranks
    int64_t offset;      // of its weights, [end - first, kLanes]
};

struct Adapter {
    const void* down;     // [inputs, ranks]
    const float* scales;  // [ranks]
    const void* up;
    const Block* blocks;  // [outputs / kLanes, rounded up]
    int64_t ranks;        // a multiple of kLanes; 0 where the slot's adapter does not change the layer
};

struct Site {
    const Adapter* adapters;  // [slots]
    const int32_t* slots;     // [rows]: which of them, -1 for none
    int64_t inputs, outputs;
};

constexpr int64_t kMostRanks = 8 * 512, kMostRows = 4, kChunk = 256, kChains = 4;

template <class T>
class Step {
public:
    Step(const Site& site, const T* x, int64_t x_stride, T* out) : site_(site), x_(x), x_stride_(x_stride), out_(out) {}

    void run(int64_t rows, int64_t threads) const {
        int64_t most = 0;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t ranks = adapter(row) ? adapter(row)->ranks : 0;
            most = most > ranks ? most : ranks;
        }
        if (!most) return;
        const int64_t work = most * (site_.inputs + site_.outputs) / 32;
        run_each((rows + kMostRows - 1) / kMostRows, work * kMostRows, threads, [&](int64_t group) {
            int64_t row = group * kMostRows;
            const int64_t end = rows < row + kMostRows ? rows : row + kMostRows;
            while (row < end) {
                int64_t next = row + 1;
                while (next < end && site_.slots[next] == site_.slots[row]) ++next;
                if (const Adapter* found = adapter(row)) add_rows(*found, row, next - row);
                row = next;
            }
        });
    }

private:
    const Adapter* adapter(int64_t row) const {
        const int32_t slot = site_.slots[row];
        return slot < 0 || !site_.adapters[slot].ranks ? nullptr : site_.adapters + slot;
    }

    void add_rows(const Adapter& adapter, int64_t row, int64_t count) const {
        switch (count) {
            case 1: return add<1>(adapter, row);
            case 2: return add<2>(adapter, row);
            case 3: return add<3>(adapter, row);
            default: return add<4>(adapter, row);
        }
    }

    template <int64_t kRows>
    void add(const Adapter& adapter, int64_t row) const {
        float inner[kRows][kMostRanks];
        for (int64_t rank = 0; rank < adapter.ranks; rank += kLanes) shrink<kRows>(adapter, row, rank, inner);
        const int64_t blocks = (site_.outputs + kLanes - 1) / kLanes;
        for (int64_t index = 0; index < blocks; ++index) {
            const Block& block = adapter.blocks[index];
            const T* weights = static_cast<const T*>(adapter.up) + block.offset;
            Vec sums[kRows];
            for (int64_t i = 0; i < kRows; ++i) sums[i] = splat(0);
            for (int64_t rank = block.first; rank < block.end; ++rank, weights += kLanes) {
                const Vec weight = load(weights);
                for (int64_t i = 0; i < kRows; ++i) sums[i] = fma(splat(inner[i][rank]), weight, sums[i]);
            }
            for (int64_t i = 0; i < kRows; ++i) {
                T* to = out_ + (row + i) * site_.outputs + index * kLanes;
                const int64_t lanes = site_.outputs - index * kLanes;
                store_first(to, load_first(to, lanes) + sums[i], lanes);
            }
        }
    }

    // Sixteen ranks of `inner`. The inputs are added in kChains sums: input k to sum k % kChains.
    template <int64_t kRows>
    void shrink(const Adapter& adapter, int64_t row, int64_t rank, float (&inner)[kRows][kMostRanks]) const {
        const T* down = static_cast<const T*>(adapter.down) + rank;
        Vec sums[kRows][kChains];
        for (auto& of_row : sums)
            for (Vec& sum : of_row) sum = splat(0);
        float x[kRows][kChunk];
        for (int64_t first = 0; first < site_.inputs; first += kChunk) {
            const int64_t count = site_.inputs - first < kChunk ? site_.inputs - first : kChunk;
            for (int64_t i = 0; i < kRows; ++i)
                for (int64_t k = 0; k < count; k += kLanes)
                    store(x[i] + k, load_first(x_ + (row + i) * x_stride_ + first + k, count - k));
            for (int64_t k = 0; k < count; k += kChains)
                for (int64_t chain = 0; chain < kChains && k + chain < count; ++chain) {
                    const Vec weight = load(down + (first + k + chain) * adapter.ranks);
                    for (int64_t i = 0; i < kRows; ++i)
                        sums[i][chain] = fma(splat(x[i][k + chain]), weight, sums[i][chain]);
                }
        }
        const Vec scale = load(adapter.scales + rank);
        for (int64_t i = 0; i < kRows; ++i)
            store(inner[i] + rank, ((sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3])) * scale);
    }

    const Site& site_;
    const T* x_;
    const int64_t x_stride_;
    T* out_;
};

}  // namespace
}  // namespace penstock::ISA

using namespace penstock::ISA;

// See kernels/lora.py. `x` is [rows, inputs], its rows x_stride apart, `out` [rows, outputs].
PENSTOCK_EXPORT(void, lora)
(const void* site, const void* x, void* out, int64_t x_stride, int64_t rows, int64_t threads, int32_t dtype) {
#define CALL(T)                                                                                            \
    Step<T>(*static_cast<const Site*>(site), static_cast<const T*>(x), x_stride, static_cast<T*>(out)).run(rows, threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(lora)
