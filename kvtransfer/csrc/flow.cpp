// Moves bytes between a stream socket and scattered memory for as long as they flow, in one call: with the interpreter
// between any two system calls, sender and receiver would wait for it half of the time.

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdint>
#include <ctime>

namespace {

constexpr size_t kFlowStepBytes = 1 << 20;  // between two looks at the stop flag
constexpr size_t kBuffersMax = 1024;    // of one call; IOV_MAX
constexpr int32_t kEnded = -1;          // in place of an errno: the peer has closed the connection

// The buffers that one call is given: a window of `kFlowStepBytes` on what is left.
struct Window {
  iovec* first;
  size_t count = 0, num_bytes = 0;

  Window(iovec* buffers, size_t num_buffers) : first(buffers) {
    while (count < num_buffers && count < kBuffersMax && num_bytes < kFlowStepBytes) num_bytes += buffers[count++].iov_len;
    cut_ = num_bytes > kFlowStepBytes ? num_bytes - kFlowStepBytes : 0;
    num_bytes -= cut_;
    first[count - 1].iov_len -= cut_;
  }

  // Takes off what was moved; returns how many buffers are done.
  size_t Advance(size_t moved) {
    first[count - 1].iov_len += cut_;
    size_t done = 0;
    for (; done < count && moved >= first[done].iov_len; ++done) {
      moved -= first[done].iov_len;
      first[done].iov_len = 0;
    }
    if (moved) {
      first[done].iov_base = static_cast<char*>(first[done].iov_base) + moved;
      first[done].iov_len -= moved;
    }
    return done;
  }

 private:
  size_t cut_;
};

// Waits until the socket is ready; false: not within `patience_us`.
bool Wait(int fd, int16_t events, int32_t patience_us) {
  pollfd waiting{fd, events, 0};
  const timespec patience{patience_us / 1000000, patience_us % 1000000 * 1000};
  return ppoll(&waiting, 1, &patience, nullptr) > 0;
}

}  // namespace

extern "C" {

// Sends `buffers` on a non-blocking socket, or fills them from it, in order, until none is left, nothing moves for
// `patience_us`, or `stop` is non-zero. The buffers are shortened by what was moved.
//
// wake_bytes: while it waits to receive, more bytes than one have to come; the socket keeps this setting (SO_RCVLOWAT).
// error: becomes an errno, kEnded, or 0. Returns the number of bytes moved.
int64_t baton_flow(int32_t fd, int32_t is_sending, iovec* buffers, int64_t num_buffers, int32_t wake_bytes,
                   int32_t patience_us, const volatile uint8_t* stop, int32_t* error) {
  size_t left = 0;
  for (int64_t i = 0; i < num_buffers; ++i) left += buffers[i].iov_len;
  const size_t all = left;
  iovec* const end = buffers + num_buffers;
  int32_t wakes_at = 0;
  *error = 0;
  while (left && !*stop) {
    Window window(buffers, end - buffers);
    msghdr message{};
    message.msg_iov = window.first;
    message.msg_iovlen = window.count;
    const ssize_t moved = is_sending ? sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                                     : recvmsg(fd, &message, MSG_DONTWAIT);
    const int32_t problem = moved < 0 ? errno : moved == 0 ? kEnded : 0;
    buffers += window.Advance(moved > 0 ? moved : 0);
    if (problem && problem != EAGAIN && problem != EINTR) {
      *error = problem;
      break;
    }
    left -= moved > 0 ? moved : 0;
    if (!left || problem == EINTR || static_cast<size_t>(moved) == window.num_bytes) continue;
    if (!is_sending) {
      const int32_t enough = left < static_cast<size_t>(wake_bytes) ? left : wake_bytes;
      if (enough != wakes_at) setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &enough, sizeof enough);
      wakes_at = enough;
    }
    if (!Wait(fd, is_sending ? POLLOUT : POLLIN, patience_us)) break;
  }
  return all - left;
}
}
