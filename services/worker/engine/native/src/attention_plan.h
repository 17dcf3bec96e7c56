// Who computes which attention of a step: tiles of queries, long ones cut into pieces so that all threads have
// equal work, however few sequences there are.
//
// A piece is a range of a tile's segments. The pieces of a tile leave the state of every segment behind, and
// whoever ends the last one folds them in order: the same sums as by one thread alone.
#pragma once
#include <atomic>
#include <vector>

#include "attention.h"
#include "team.h"

namespace hortator {

constexpr int64_t kTileQueries = 96;      // enough to pay for turning keys; their state and scores fit the caches
constexpr int64_t kReadCost = 8;          // reading KV costs about as much as this many queries
constexpr int64_t kPiecesPerThread = 16;  // their ends leave a thread idle for less than a piece

// Sequences of consecutive tokens: row r owns tokens [row_start[r], row_start[r + 1]), its blocks are table [r, table_width].
struct Sequences {
    int64_t count, table_width;
    const int32_t *row_start, *positions, *table;
};

// Tokens of a batch, ascending.
struct Chosen {
    int64_t count;
    const int32_t* tokens;
};

// Query heads of each KV head, lying side by side in this order.
struct Groups {
    int64_t kv_heads;
    const int32_t* queries;  // [kv_heads]
};

// Queries and results [tokens, ld], head h at h * head_dim.
struct Heads {
    const float* q;
    int64_t ldq;
    float* out;
    int64_t ldo;
};

// Of tokens [first, stop) of a batch.
class AttentionPlan {
  public:
    AttentionPlan(Team& team, const Sequences& rows, const Groups& groups, int64_t dim, int64_t first, int64_t stop,
                  const Chosen& chosen = {0, nullptr})
        : team_(team), dim_(dim) {
        int64_t total = 0;
        for (int64_t r = 0; r < rows.count; r++) {
            const int64_t begin = std::max<int64_t>(first, rows.row_start[r]);
            const int64_t end = std::min<int64_t>(stop, rows.row_start[r + 1]);
            if (begin < end) add_row(rows, r, begin, end - begin, groups, total);
        }
        mark(chosen);
        cut(team.size() > 1 ? total / (team.size() * kPiecesPerThread) + 1 : total);
    }

    // Floats that the states of long jobs take; plans of which one runs at a time may share them.
    int64_t state_floats() const { return state_floats_; }
    void use_states(float* memory) { states_ = memory; }

    // Attention over one layer's pages by the whole team. Ends with a barrier.
    template <class T>
    void run(int member, const Pages& pages, const Heads& heads) {
        run_pieces<T>(pieces_, member, pages, heads);
    }

    // The same; results of tokens that were not chosen may be left out.
    template <class T>
    void run_chosen(int member, const Pages& pages, const Heads& heads) {
        run_pieces<T>(chosen_pieces_, member, pages, heads);
    }

  private:
    struct Job {
        Tile tile;
        int64_t token;        // the tile's first in the batch
        int64_t query_at;     // floats into a token's queries where those of the tile begin
        int64_t pieces;
        int64_t state_at;     // floats into the states of segments, if there are several pieces
        int32_t pieces_left;
        bool chosen;          // whether one of its tokens is
    };

    struct Piece {
        int32_t job, first, stop;  // segments [first, stop)
        int64_t cost;
    };

    int64_t cost_of(const Tile& tile, int64_t first, int64_t stop) const {
        const int64_t tokens = std::min(stop * kSegment, tile.length()) - first * kSegment;
        return tokens * (tile.queries() + kReadCost);
    }

    void add_row(const Sequences& rows, int64_t r, int64_t begin, int64_t count, const Groups& groups,
                 int64_t& total) {
        const int32_t* table = rows.table + r * rows.table_width;
        int64_t query_at = 0;
        for (int64_t h = 0; h < groups.kv_heads; h++) {
            const int64_t group = groups.queries[h], height = std::max<int64_t>(1, kTileQueries / group);
            for (int64_t first = 0; first < count; first += height) {
                const Tile tile{table, h, group, rows.positions[begin + first], std::min(height, count - first)};
                jobs_.push_back({tile, begin + first, query_at, 1, 0, 1, false});
                total += cost_of(tile, 0, tile.segments());
                most_queries_ = std::max(most_queries_, tile.queries());
            }
            query_at += group * dim_;
        }
    }

    void mark(const Chosen& chosen) {
        const int32_t* const end = chosen.tokens + chosen.count;
        for (Job& job : jobs_) {
            const int32_t* next = std::lower_bound(chosen.tokens, end, job.token);
            job.chosen = next != end && *next < job.token + job.tile.tokens;
        }
    }

    // Cut jobs into pieces that cost no more than `most` where segments allow it, and put the long ones first.
    void cut(int64_t most) {
        for (size_t j = 0; j < jobs_.size(); j++) {
            Job& job = jobs_[j];
            const int64_t segments = job.tile.segments(), cost = cost_of(job.tile, 0, segments);
            job.pieces = std::min(segments, (cost + most - 1) / most);
            job.pieces_left = int32_t(job.pieces);
            if (job.pieces > 1) {
                job.state_at = state_floats_;
                state_floats_ += segments * Running::floats(job.tile.queries(), dim_);
            }
            for (int64_t p = 0; p < job.pieces; p++) {
                const int64_t first = segments * p / job.pieces, stop = segments * (p + 1) / job.pieces;
                pieces_.push_back({int32_t(j), int32_t(first), int32_t(stop), cost_of(job.tile, first, stop)});
            }
        }
        std::stable_sort(pieces_.begin(), pieces_.end(), [](auto& a, auto& b) { return a.cost > b.cost; });
        for (const Piece& piece : pieces_) {
            if (jobs_[piece.job].chosen) chosen_pieces_.push_back(piece);
        }
    }

    Running state(const Job& job, int64_t segment) const {
        const int64_t queries = job.tile.queries();
        return Running(states_ + job.state_at + segment * Running::floats(queries, dim_), queries, dim_);
    }

    template <class T>
    void run_pieces(const std::vector<Piece>& pieces, int member, const Pages& pages, const Heads& heads) {
        const int64_t room = AttentionScratch::floats(most_queries_, dim_);
        const AttentionScratch scratch(team_.scratch(member, room), most_queries_, dim_);
        team_.each(int64_t(pieces.size()), [&](int64_t i) { compute<T>(pieces[i], pages, heads, scratch); });
    }

    template <class T>
    void compute(const Piece& piece, const Pages& pages, const Heads& heads, const AttentionScratch& s) {
        Job& job = jobs_[piece.job];
        const Tile& tile = job.tile;
        const int64_t queries = tile.queries(), at = job.query_at;
        scale_queries(tile, dim_, heads.q + job.token * heads.ldq + at, heads.ldq, s.scaled);
        if (job.pieces == 1) {
            s.total.clear(queries, dim_);
            for (int64_t i = piece.first; i < piece.stop; i++) {
                attend_segment<T>(pages, tile, i, s, s.part);
                fold(s.total, s.part, queries, dim_);
            }
        } else {
            for (int64_t i = piece.first; i < piece.stop; i++) attend_segment<T>(pages, tile, i, s, state(job, i));
            std::atomic_ref left(job.pieces_left);
            if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
            left.store(int32_t(job.pieces), std::memory_order_relaxed);  // for the next layer, behind a barrier
            s.total.clear(queries, dim_);
            for (int64_t i = 0; i < tile.segments(); i++) fold(s.total, state(job, i), queries, dim_);
        }
        write_means(tile, dim_, s.total, heads.out + job.token * heads.ldo + at, heads.ldo);
    }

    Team& team_;
    const int64_t dim_;
    int64_t most_queries_ = 1, state_floats_ = 0;
    float* states_ = nullptr;  // of the segments of jobs in several pieces
    std::vector<Job> jobs_;
    std::vector<Piece> pieces_, chosen_pieces_;
};

}  // namespace hortator
