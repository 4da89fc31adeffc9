/* SPDX-License-Identifier: BSD-3-Clause */
/* The connection to the server, which is the emulator's process. The server is started at the first
   request, and communicates with this process over a pair of sockets. The server ends when the
   client's socket is closed, which happens however the client ends. If the server ends first, the
   device is lost, and every later call fails. */
#define _GNU_SOURCE
#include "device.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define REPLY_LIMIT (64ull << 20)
extern char **environ;
static int connection = -1;

static bool send_all(const void *data, size_t size) {
    for (const char *p = data; size;) {
        ssize_t n = send(connection, p, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        p += n, size -= (size_t)n;
    }
    return true;
}

static bool receive_all(void *data, size_t size) {
    for (char *p = data; size;) {
        ssize_t n = recv(connection, p, size, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        p += n, size -= (size_t)n;
    }
    return true;
}

static hipError_t lost(const char *why) {
    device_say("%s", why);
    device_fail(hipErrorUnknown);
    return hipErrorUnknown;
}

/* Receives a reply and returns its error. If there is no error, sets *data to the reply's bytes. */
static hipError_t receive(void **data, size_t *size) {
    struct reply head;
    if (!receive_all(&head, sizeof head)) return lost("the emulator's process has ended");
    if (head.size > REPLY_LIMIT) return lost("the emulator's answer has an invalid size");
    char *bytes = malloc(head.size + 1);
    if (!bytes) return lost("out of memory");
    if (!receive_all(bytes, head.size)) {
        free(bytes);
        return lost("the emulator's process has ended");
    }
    bytes[head.size] = 0;
    if (head.status) {
        if (head.size) device_say("%s", bytes);
        free(bytes);
        if (head.lasting) device_fail((hipError_t)head.status);
        return (hipError_t)head.status;
    }
    *data = bytes;
    *size = head.size;
    return hipSuccess;
}

/* Executes the server in a forked child. Only functions that are safe between fork and exec are
   called. The server gets the socket as file descriptor 3 and the pool as 4. Of the client's other
   files, it keeps only standard error, to which its standard output goes too. */
static void become_server(int socket, int pool, char **arguments, char **environment) {
    socket = fcntl(socket, F_DUPFD, 10);
    pool = fcntl(pool, F_DUPFD, 10);
    int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, 0);
    dup2(2, 1);
    dup2(socket, 3);
    dup2(pool, 4);
    if (syscall(SYS_close_range, 5u, ~0u, 0u))
        for (int i = 5; i < 1024; i++) close(i);
    execvpe(arguments[0], arguments, environment);
    _exit(127);
}

static hipError_t start(void) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) return hipErrorNoDevice;
    const char *python = getenv("STRIX_EMULATE_PYTHON");
    char *arguments[] = {(char *)(python && *python ? python : "python3"),
                         "-m",
                         "strix_emulate.device.server",
                         "3",
                         "4",
                         NULL};
    /* Remove LD_PRELOAD: the server must not load the libraries that are preloaded into the client,
       such as this library or that of a sanitizer. */
    size_t count = 0, kept = 0;
    while (environ[count]) count++;
    char **environment = calloc(count + 1, sizeof *environment);
    if (!environment) return hipErrorOutOfMemory;
    for (size_t i = 0; i < count; i++)
        if (strncmp(environ[i], "LD_PRELOAD=", 11)) environment[kept++] = environ[i];
    /* Fork twice, so that the server is not a child of the client. The client may wait for any of
       its children, and would then wait for the server. */
    pid_t child = fork();
    if (!child) {
        if (!fork()) become_server(ends[1], pool_file(), arguments, environment);
        _exit(0);
    }
    free(environment);
    close(ends[1]);
    while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR) {
    }
    connection = ends[0];
    struct hello *hello;
    size_t size;
    hipError_t error = receive((void **)&hello, &size);
    if (!error && (size != sizeof *hello || hello->version != PROTOCOL_VERSION))
        error = lost("the emulator has another version than this library");
    if (error) {
        device_say("cannot start the emulator: %s -m strix_emulate.device.server", arguments[0]);
        device_fail(hipErrorNoDevice);
        return hipErrorNoDevice;
    }
    free(hello);
    return hipSuccess;
}

hipError_t link_request(uint32_t operation, const struct part *parts, int count, void **reply,
                        size_t *reply_size) {
    hipError_t error = pool_map();
    if (!error && connection < 0) error = start();
    if (error) return error;
    struct request head = {operation, 0, 0};
    for (int i = 0; i < count; i++) head.size += parts[i].size;
    bool sent = send_all(&head, sizeof head);
    for (int i = 0; sent && i < count; i++) sent = send_all(parts[i].data, parts[i].size);
    if (!sent) return lost("the emulator's process has ended");
    void *data;
    size_t size;
    error = receive(&data, &size);
    if (error) return error;
    if (reply) *reply = data, *reply_size = size;
    else free(data);
    return hipSuccess;
}
