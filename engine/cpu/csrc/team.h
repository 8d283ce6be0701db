// The threads of one worker. A whole step is one parallel region: every thread walks through the same phases, takes
// chunks of each phase's work from a shared counter, and meets the others at a barrier. Waiting spins for some
// tens of microseconds, which is faster than sleeping while cores are quiet, then sleeps in the kernel, so that a busy
// neighbour costs one time slice instead of two.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace baton {

class Team {
   public:
    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { work(i); });
    }

    ~Team() {
        stopping_ = true;
        start_.fetch_add(1);
        start_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Runs `body` on every thread, the caller's included; returns when all are done.
    template <class Body>
    void run(const Body& body) {
        if (size_ > 1) {
            body_ = [](const void* b) { (*static_cast<const Body*>(b))(); };
            argument_ = &body;
            start_.fetch_add(1, std::memory_order_release);
            start_.notify_all();
        }
        body();
        barrier();
    }

    // Called by all threads with the same arguments: f(begin, end) covers [0, count) in pieces of `grain`.
    template <class F>
    void share(int64_t count, int64_t grain, const F& f) {
        if (size_ == 1) {
            if (count > 0) f(int64_t{0}, count);
            return;
        }
        while (true) {
            const int64_t begin = next_.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= count) break;
            f(begin, std::min(count, begin + grain));
        }
        barrier();
    }

    // Calls f(i, following) for every i of [0, count): `following` is what the thread takes after i, or `count` where it
    // takes nothing. To know it, a thread claims its next piece of `grain` before it is done with one; where a piece is
    // too much of all there is, none is claimed early and i + 1 is said to follow.
    template <class F>
    void walk(int64_t count, int64_t grain, const F& f) {
        const bool knows = count >= 8 * size_ * grain;
        if (size_ == 1 || !knows) {
            share(count, grain, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; i++) f(i, i + 1);
            });
            return;
        }
        for (int64_t begin = next_.fetch_add(grain, std::memory_order_relaxed); begin < count;) {
            const int64_t after = std::min(count, next_.fetch_add(grain, std::memory_order_relaxed));
            const int64_t end = std::min(count, begin + grain);
            for (int64_t i = begin; i < end; i++) f(i, i + 1 < end ? i + 1 : after);
            begin = after;
        }
        barrier();
    }

   private:
    // About 30 us on Zen 3 and 4, where a pause takes some 40 to 65 cycles.
    static constexpr int kSpins = 2000;

    static void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
        for (int i = 0; i < kSpins; i++) {
            if (value.load(std::memory_order_acquire) != old) return;
            _mm_pause();
        }
        while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
    }

    void barrier() {
        if (size_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            // Everybody has left the last phase's loop: its counter can start again.
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.fetch_add(1, std::memory_order_release);
            phase_.notify_all();
        } else {
            wait_for_change(phase_, phase);
        }
    }

    void work(int) {
        uint32_t seen = 0;
        while (true) {
            wait_for_change(start_, seen);
            seen++;
            if (stopping_) return;
            body_(argument_);
            barrier();
        }
    }

    const int size_;
    void (*body_)(const void*) = nullptr;
    const void* argument_ = nullptr;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> start_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::vector<std::thread> threads_;
};

}  // namespace baton
