/* Asks the agent of the host, and knows how tasks are divided over a job's VMs. */
#define _GNU_SOURCE
#include "client.h"
#include "loader.h"
#include "options.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define CHOICE "MULTIVERSE_VM=" /* in a step's environment: which of a node's VMs its tasks run in */

static long long now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000LL + at.tv_nsec / 1000000;
}

/* Sends a request to the agent at that socket. The descriptor, or -1 with the reason in `problem`. */
static int send_request(const char *agent, int seconds, const char *request)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct timeval limit = {.tv_sec = seconds}; /* connect(2) waits while too many others do */
	int fd = -1;

	snprintf(address.sun_path, sizeof address.sun_path, "%s", agent);
	if ((fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0 &&
	    !setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) &&
	    !connect(fd, (struct sockaddr *)&address, sizeof address) &&
	    send(fd, request, strlen(request), MSG_NOSIGNAL) == (ssize_t)strlen(request))
		return fd;
	snprintf(problem, sizeof problem, "the agent of this host does not answer at %s: %s", agent, strerror(errno));
	if (fd >= 0)
		close(fd);
	return -1;
}

/* Asks the agent at that socket, for at most so many seconds. 0, with what it tells in `told`; or -1 with the reason in
 * `problem`. What it tells has at most LONGEST_ANSWER bytes. */
int ask(const char *agent, int seconds, const char *request, char told[LONGEST_ANSWER])
{
	long long deadline = now() + seconds * 1000LL;
	int fd = send_request(agent, seconds, request);
	size_t length = 0;

	if (fd < 0)
		return -1;
	*problem = *told = 0;
	while (!strchr(told, '\n') && length < LONGEST_ANSWER - 1) {
		struct pollfd ready = {.fd = fd, .events = POLLIN};
		long long left = deadline - now();
		ssize_t got = left > 0 ? poll(&ready, 1, (int)left) : 0;

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0) {
			snprintf(problem, sizeof problem, "the agent of this host gave no answer within %d s", seconds);
			break;
		}
		got = recv(fd, told + length, LONGEST_ANSWER - 1 - length, 0);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			break;
		length += (size_t)got;
		told[length] = 0;
	}
	close(fd);
	told[strcspn(told, "\n")] = 0;
	if (!*problem && !strncmp(told, "ok", 2) && (!told[2] || told[2] == ' ')) {
		memmove(told, told + 2 + (told[2] == ' '), strlen(told + 2) + (told[2] != ' '));
		return 0;
	}
	if (*problem)
		return -1;
	if (!strncmp(told, "error ", 6))
		snprintf(problem, sizeof problem, "%.1000s", told + 6);
	else
		snprintf(problem, sizeof problem, "the agent of this host %s",
			 length ? "gave an answer that makes no sense" : "ended while it was asked");
	return -1;
}

/*
 * Which of the node's VMs a task runs in: the tasks of a step are divided in blocks, in the order of their local ids.
 * With fewer tasks than VMs, the last VMs get none.
 */
unsigned vm_of(unsigned task, unsigned tasks, unsigned vms)
{
	return tasks > vms ? (unsigned)((unsigned long long)task * vms / tasks) : task < vms ? task : 0;
}

/* The VM that a step was started for, which its user says: all are the user's. -1 if it is for all of the node's, or with
 * the reason in `problem` if there is none of that number. */
int chosen_vm(char **environment, unsigned vms)
{
	for (; environment && *environment; environment++) {
		const char *text = *environment + strlen(CHOICE);
		unsigned long found;
		char *end;

		if (strncmp(*environment, CHOICE, strlen(CHOICE)))
			continue;
		found = strtoul(text, &end, 10);
		if (*text >= '0' && *text <= '9' && !*end && found < vms)
			return (int)found;
		snprintf(problem, sizeof problem, CHOICE "%.20s: the job has the VMs 0 to %u on this node", text, vms - 1);
	}
	return -1;
}

/* Whether Slurm serves PMI to this task: MPI would take the tasks of a node for neighbours that share memory. */
int has_pmi(char **environment)
{
	static const char *const names[] = {"PMI_FD=", "PMIX_NAMESPACE="};

	for (; environment && *environment; environment++)
		for (size_t i = 0; i < sizeof names / sizeof *names; i++)
			if (!strncmp(*environment, names[i], strlen(names[i])))
				return 1;
	return 0;
}

/*
 * A copy of an environment for mventer, which is a program on this host: what the dynamic loader and the C library would
 * load for it gets a prefix that mventer takes off again, because a user's library is for the guest. The task is told how
 * many VMs each node has, and how many regions they share. It is not told in which VM its step was started: its own steps
 * are not bound to that one. NULL if there is no memory.
 */
char **keep_for_guest(char **environment)
{
	static char vms[sizeof values[VMS] + 32], regions[sizeof values[REGIONS] + 32];
	size_t count = 0, used = 0;
	char **copy, *kept;

	while (environment[count])
		count++;
	if (!(copy = calloc(count + 3, sizeof *copy)))
		return NULL;
	snprintf(vms, sizeof vms, "MULTIVERSE_VMS_PER_NODE=%s", *values[VMS] ? values[VMS] : "1");
	snprintf(regions, sizeof regions, "MULTIVERSE_IVSHMEM=%s", *values[REGIONS] ? values[REGIONS] : "0");
	for (size_t i = 0; i < count; i++) {
		if (!strncmp(environment[i], CHOICE, strlen(CHOICE)))
			continue;
		copy[used] = environment[i];
		if (is_for_the_loader(environment[i])) {
			if (asprintf(&kept, KEPT_PREFIX "%s", environment[i]) < 0)
				return NULL;
			copy[used] = kept;
		}
		if (!strncmp(environment[i], "MULTIVERSE_VMS_PER_NODE=", 24)) /* of the step that this srun is in */
			copy[used] = vms;
		if (!strncmp(environment[i], "MULTIVERSE_IVSHMEM=", 19))
			copy[used] = regions;
		used++;
	}
	copy[used++] = vms; /* getenv(3) finds the first one */
	copy[used] = regions;
	return copy;
}
