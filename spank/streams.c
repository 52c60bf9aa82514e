/*
 * The streams on which slurmstepd serves PMI to the task, carried into the guest as frames of the task's connection. A
 * frame J begins with the number of a stream; one without more is the end of it.
 *
 * Number 0 is what a task inherits for srun --mpi=pmi2. With srun --mpi=pmix, slurmstepd listens on the loopback
 * interface. The guest accepts connections in its place, and a frame with a number that is not in use stands for a new one.
 * No other port is connected to than the one that slurmstepd named in the task's environment.
 */
#define _GNU_SOURCE
#include "mventer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define FREE -1
#define ENDED -2 /* here; the guest has yet to say that it is ended there, and what it sends until then means nothing */

static int streams[STREAMS]; /* descriptors, FREE or ENDED */
static int pmix_port;

/* Finds out how slurmstepd serves PMI to this task. */
void find_streams(void)
{
	static const char server[] = "tcp4://127.0.0.1:";
	const char *given = getenv("PMI_FD"), *found;
	int fd = given ? atoi(given) : -1;
	struct stat seen;

	for (int i = 0; i < STREAMS; i++)
		streams[i] = FREE;
	for (char **each = environ; *each && !pmix_port; each++)
		if (!strncmp(*each, "PMIX_SERVER_URI", 15) && (found = strstr(*each, server)))
			pmix_port = atoi(found + strlen(server));
	if (fd < 3 || fstat(fd, &seen) || !S_ISSOCK(seen.st_mode))
		return; /* the variable is of a step that this one was started from */
	streams[0] = fd;
	fcntl(fd, F_SETFD, FD_CLOEXEC);
}

/* Lets the guest make the stream that the command inherits. */
void announce_stream(void)
{
	if (streams[0] >= 0)
		send_frame('J', "", 1);
}

void close_streams(void)
{
	for (int i = 0; i < STREAMS; i++) {
		if (streams[i] >= 0)
			close(streams[i]);
		streams[i] = FREE;
	}
}

static void connect_pmix(int number)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)pmix_port),
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;

	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) {
		if (fd >= 0)
			close(fd);
		return;
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	streams[number] = fd;
}

static void end_stream(int number, int state)
{
	char which = (char)number;

	send_frame('J', &which, 1);
	if (streams[number] >= 0)
		close(streams[number]);
	streams[number] = state;
}

/* Passes on what the guest has sent. slurmstepd reads requests always, so that this waits for moments only. */
void take_stream(const char *data, size_t length)
{
	int number = length ? (unsigned char)*data : STREAMS;

	if (number >= STREAMS)
		return;
	if (length == 1) {
		if (streams[number] == ENDED)
			streams[number] = FREE;
		/* That of a task ends with mventer: slurmstepd 22.05 reads again and again from one that ended before its task. */
		else if (number && streams[number] >= 0)
			end_stream(number, FREE);
		return;
	}
	if (streams[number] == FREE && number && pmix_port)
		connect_pmix(number);
	if (streams[number] == FREE) {
		end_stream(number, ENDED);
		return;
	}
	for (data++, length--; length && streams[number] >= 0;) {
		ssize_t sent = send(streams[number], data, length, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0) {
			end_stream(number, ENDED);
		} else {
			data += sent;
			length -= (size_t)sent;
		}
	}
}

void watch_streams(struct pollfd ready[STREAMS])
{
	for (int i = 0; i < STREAMS; i++)
		ready[i] = (struct pollfd){.fd = streams[i], .events = POLLIN};
}

/* Sends the guest what slurmstepd has said. */
void tend_streams(const struct pollfd ready[STREAMS])
{
	for (int i = 0; i < STREAMS; i++) {
		char data[8193];
		ssize_t got;

		if (streams[i] < 0 || ready[i].fd != streams[i] || !ready[i].revents)
			continue;
		got = recv(streams[i], data + 1, sizeof data - 1, MSG_DONTWAIT);
		if (got < 0 && (errno == EINTR || errno == EAGAIN))
			continue;
		*data = (char)i;
		if (got > 0)
			send_frame('J', data, (size_t)got + 1);
		else
			end_stream(i, ENDED);
	}
}
