// Holds what a process sends over TCP to a given rate, and what it receives to the same: see limiting.py.
//
// Preloaded, it stands before the C library's send, recv, read, write and their kin. Each way is one link that all
// threads of the process share. It takes a piece when it is free, and is then busy for as long as the piece takes at
// its rate. Who comes meanwhile waits, or is told EAGAIN where the socket does not block.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PIECE (64 << 10)  // bytes that are taken at once: 21 us at 25 Gbit/s
#define CREDIT 10000000    // ns that a link goes on by itself with what waits for it, while nobody looks
#define GAP 100000        // ns after which a piece may come and still count as one that has waited behind the last
#define MOST_PARTS 1024   // of a message, as the kernel has it

enum { OUT, IN };

typedef struct {
    _Atomic int64_t free_at;  // ns
    _Atomic int64_t last;     // ns at which the last piece was taken
    _Atomic int64_t since;    // ns from which on something waits, 0 if nothing does
    _Atomic int64_t bytes;    // that have passed
    _Atomic int64_t waited;   // ns in which something waited for the link
} Way;

static Way ways[2];
static _Atomic double ns_per_byte;  // 0: without limit
static _Atomic long nap_ns;         // for which one that is told EAGAIN sleeps first

void limited_link_rate(double gbit) { ns_per_byte = gbit > 0 ? 8.0 / gbit : 0.0; }

void limited_link_counts(int64_t out[4]) {
    for (int way = OUT; way <= IN; way++) {
        out[2 * way] = ways[way].bytes;
        out[2 * way + 1] = ways[way].waited;
    }
}

__attribute__((constructor)) static void begin(void) {
    const char *rate = getenv("LIMITED_LINK_GBIT"), *nap = getenv("LIMITED_LINK_NAP_US");
    limited_link_rate(rate ? atof(rate) : 0.0);
    nap_ns = nap ? 1000 * atol(nap) : 0;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void sleep_ns(int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

static int is_tcp(int fd) {
    int domain = 0, type = 0, saved = errno;
    socklen_t size = sizeof domain;
    int no = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    size = sizeof type;
    no = no || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size);
    errno = saved;
    return !no && (domain == AF_INET || domain == AF_INET6) && type == SOCK_STREAM;
}

// Somebody has something for the link, which does not take it yet. Who receives asks also when there is nothing.
static void note_waiting(Way *way, int fd, int64_t now) {
    int there = 1;
    if (way == &ways[IN] && (ioctl(fd, FIONREAD, &there) || there <= 0)) return;
    int64_t nobody = 0;
    atomic_compare_exchange_strong(&way->since, &nobody, now);
}

// The link was free and has taken so many bytes: it is busy for their time. If they have waited, it began when it
// became free and not only when somebody came to look. What comes in may make up for more: who sent it was held to
// the rate, and the two must not slow each other down.
static void charge(Way *way, ssize_t bytes) {
    way->bytes += bytes;
    double each = ns_per_byte;
    if (each == 0.0) return;
    int64_t now = now_ns(), since = atomic_exchange(&way->since, 0), before = way->free_at, begins;
    int waits = now - atomic_exchange(&way->last, now) < GAP || since || way == &ways[IN];
    if (since) way->waited += now - since;
    do {
        begins = now - (waits ? CREDIT : 0);
        if (before > begins) begins = before;
    } while (!atomic_compare_exchange_weak(&way->free_at, &before, begins + (int64_t)(each * bytes)));
}

static ssize_t plain(int which, int fd, struct msghdr *message, int flags) {
    return syscall(which == OUT ? SYS_sendmsg : SYS_recvmsg, fd, message, flags);
}

static ssize_t transfer(int which, int fd, const struct msghdr *given, int flags) {
    struct msghdr message = *given;
    size_t left = 0;
    for (size_t k = 0; k < given->msg_iovlen; k++) left += given->msg_iov[k].iov_len;
    if (left == 0 || given->msg_iovlen > MOST_PARTS || (flags & (MSG_PEEK | MSG_ERRQUEUE | MSG_OOB)))
        return plain(which, fd, (struct msghdr *)given, flags);
    Way *way = &ways[which];
    if (ns_per_byte == 0.0) {
        ssize_t done = plain(which, fd, (struct msghdr *)given, flags);
        if (done > 0) charge(way, done);
        return done;
    }
    int blocks = !(flags & MSG_DONTWAIT) && !(fcntl(fd, F_GETFL) & O_NONBLOCK), all = which == OUT || flags & MSG_WAITALL;
    struct iovec parts[MOST_PARTS];
    size_t first = 0, offset = 0;
    ssize_t total = 0;
    while (left) {
        int64_t now = now_ns(), wait = way->free_at - now;
        if (wait > 0) {
            note_waiting(way, fd, now);
            if (blocks) {
                sleep_ns(wait);
                continue;
            }
            if (total) return total;
            if (nap_ns) sleep_ns(wait < nap_ns ? wait : nap_ns);
            errno = EAGAIN;
            return -1;
        }
        size_t count = 0, size = 0;
        for (size_t k = first; k < given->msg_iovlen && size < PIECE; k++, count++) {
            size_t skip = k == first ? offset : 0, here = given->msg_iov[k].iov_len - skip;
            if (here > PIECE - size) here = PIECE - size;
            parts[count] = (struct iovec){(char *)given->msg_iov[k].iov_base + skip, here};
            size += here;
        }
        message.msg_iov = parts;
        message.msg_iovlen = count;
        ssize_t done = plain(which, fd, &message, flags);
        if (which == IN) ((struct msghdr *)given)->msg_flags = message.msg_flags;
        if (done <= 0) return total ? total : done;
        charge(way, done);
        total += done;
        left -= done;
        for (offset += done; first < given->msg_iovlen && offset >= given->msg_iov[first].iov_len; first++)
            offset -= given->msg_iov[first].iov_len;
        if (left || which == IN) note_waiting(way, fd, now_ns());
        if (!all || (which == IN && (size_t)done < size)) return total;
    }
    return total;
}

static ssize_t one(int which, int fd, const void *data, size_t size, int flags) {
    struct iovec part = {(void *)data, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    return transfer(which, fd, &message, flags);
}

static ssize_t several(int which, int fd, const struct iovec *parts, int count) {
    struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = count};
    return transfer(which, fd, &message, 0);
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    return is_tcp(fd) ? one(OUT, fd, data, size, flags) : syscall(SYS_sendto, fd, data, size, flags, NULL, 0);
}

ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length) {
    return is_tcp(fd) ? one(OUT, fd, data, size, flags) : syscall(SYS_sendto, fd, data, size, flags, to, length);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    return is_tcp(fd) ? transfer(OUT, fd, message, flags) : plain(OUT, fd, (struct msghdr *)message, flags);
}

ssize_t write(int fd, const void *data, size_t size) {
    return is_tcp(fd) ? one(OUT, fd, data, size, 0) : syscall(SYS_write, fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    return is_tcp(fd) ? several(OUT, fd, parts, count) : syscall(SYS_writev, fd, parts, count);
}

ssize_t recv(int fd, void *data, size_t size, int flags) {
    return is_tcp(fd) ? one(IN, fd, data, size, flags) : syscall(SYS_recvfrom, fd, data, size, flags, NULL, NULL);
}

ssize_t recvfrom(int fd, void *data, size_t size, int flags, struct sockaddr *from, socklen_t *length) {
    if (is_tcp(fd) && from == NULL) return one(IN, fd, data, size, flags);
    return syscall(SYS_recvfrom, fd, data, size, flags, from, length);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    return is_tcp(fd) ? transfer(IN, fd, message, flags) : plain(IN, fd, message, flags);
}

ssize_t read(int fd, void *data, size_t size) {
    return is_tcp(fd) ? one(IN, fd, data, size, 0) : syscall(SYS_read, fd, data, size);
}

ssize_t readv(int fd, const struct iovec *parts, int count) {
    return is_tcp(fd) ? several(IN, fd, parts, count) : syscall(SYS_readv, fd, parts, count);
}

// What programs that were compiled with checks of buffers' sizes call.
ssize_t __recv_chk(int fd, void *data, size_t size, size_t room, int flags) {
    if (size > room) abort();
    return recv(fd, data, size, flags);
}

ssize_t __recvfrom_chk(int fd, void *data, size_t size, size_t room, int flags, struct sockaddr *from, socklen_t *length) {
    if (size > room) abort();
    return recvfrom(fd, data, size, flags, from, length);
}

ssize_t __read_chk(int fd, void *data, size_t size, size_t room) {
    if (size > room) abort();
    return read(fd, data, size);
}
