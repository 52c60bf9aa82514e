/* Breadth-first searches of a Kronecker graph by several processes: a kernel of the kind of Graph500's reference code,
 * with TCP in place of MPI, so that it runs in guests without any package.
 *
 *     bfs SCALE EDGES SEARCHES RANK PORT ADDRESS...
 *
 * The graph has 2^SCALE vertices and EDGES times as many edges, made as by Graph500's generator (A, B, C = 0.57, 0.19,
 * 0.19). There is one ADDRESS for each process; process RANK listens at its own one, at PORT + RANK. A vertex belongs to
 * the process that its number modulo their number tells. In each level, each process sends what it has found to the
 * owners. Each search is validated: a parent is one level above its child. Process 0 prints one line:
 *
 *     searches=8 edges=2092184 seconds=1.234 levels=372104
 *
 * `edges` were traversed, in so many seconds; `levels` is the sum of all levels, which the number of processes does not
 * change.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, PATIENCE = 120 };

struct buffer {
	char *data;
	size_t size, room;
};

struct pair {
	uint32_t to, about;
};

static int rank, count, peer[MOST];
static uint32_t vertices;

static void fail(const char *what)
{
	fprintf(stderr, "bfs: process %d: %s: %s\n", rank, what, strerror(errno));
	exit(1);
}

static double now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec + at.tv_nsec / 1e9;
}

static void *need(void *memory)
{
	if (!memory)
		fail("no memory");
	return memory;
}

static void append(struct buffer *buffer, const void *data, size_t size)
{
	if (buffer->size + size > buffer->room) {
		buffer->room = 2 * (buffer->size + size) + 4096;
		buffer->data = need(realloc(buffer->data, buffer->room));
	}
	memcpy(buffer->data + buffer->size, data, size);
	buffer->size += size;
}

static void tell(struct buffer *out, uint32_t to, uint32_t about)
{
	struct pair pair = {to, about};

	append(&out[to % count], &pair, sizeof(pair));
}

/* --- the connections between all processes ----------------------------------------------------------------------- */

static int listening(int port)
{
	struct sockaddr_in own = {.sin_family = AF_INET, .sin_port = htons(port)};
	int yes = 1, listener = socket(AF_INET, SOCK_STREAM, 0);

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	if (listener < 0 || bind(listener, (struct sockaddr *)&own, sizeof(own)) || listen(listener, MOST))
		fail("cannot listen");
	return listener;
}

static int connected(const char *address, int port)
{
	struct sockaddr_in other = {.sin_family = AF_INET, .sin_port = htons(port)};
	double until = now() + PATIENCE;

	if (!inet_aton(address, &other.sin_addr))
		fail(address);
	while (now() < until) {
		int made = socket(AF_INET, SOCK_STREAM, 0);

		if (!connect(made, (struct sockaddr *)&other, sizeof(other)))
			return made;
		close(made);
		usleep(100000);
	}
	fail(address);
	return -1;
}

static void take(int from, void *data, size_t size)
{
	if (recv(from, data, size, MSG_WAITALL) != (ssize_t)size)
		fail("a process has ended");
}

/* Each process connects to those before it, and says which one it is. */
static void connect_all(int port, char **addresses)
{
	int yes = 1, listener = listening(port + rank);

	for (int other = 0; other < rank; other++) {
		uint32_t own = rank;

		peer[other] = connected(addresses[other], port + other);
		if (write(peer[other], &own, sizeof(own)) != sizeof(own))
			fail("cannot send");
	}
	for (int more = rank + 1; more < count; more++) {
		uint32_t other;
		int made = accept(listener, NULL, NULL);

		if (made < 0)
			fail("cannot accept");
		take(made, &other, sizeof(other));
		if (other <= (uint32_t)rank || other >= (uint32_t)count)
			fail("an unknown process");
		peer[other] = made;
	}
	close(listener);
	for (int other = 0; other < count; other++) {
		if (other == rank)
			continue;
		setsockopt(peer[other], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
		fcntl(peer[other], F_SETFL, O_NONBLOCK);
	}
}

/* How much of a message to or from one process is done: its length, and then its data. */
struct progress {
	uint64_t length;
	size_t done;
};

static int send_some(int other, struct progress *at, const struct buffer *out)
{
	const char *from = at->done < 8 ? (char *)&at->length + at->done : out->data + (at->done - 8);
	size_t left = at->done < 8 ? 8 - at->done : out->size + 8 - at->done;
	ssize_t sent = send(peer[other], from, left, MSG_NOSIGNAL);

	if (sent < 0 && errno != EAGAIN)
		fail("cannot send");
	at->done += sent > 0 ? sent : 0;
	return at->done == out->size + 8;
}

static int receive_some(int other, struct progress *at, struct buffer *in)
{
	ssize_t got;

	if (at->done < 8)
		got = recv(peer[other], (char *)&at->length + at->done, 8 - at->done, 0);
	else
		got = recv(peer[other], in->data + (at->done - 8), at->length + 8 - at->done, 0);
	if (got == 0 || (got < 0 && errno != EAGAIN))
		fail("a process has ended");
	at->done += got > 0 ? got : 0;
	if (at->done == 8 && at->length > in->room) {
		in->room = at->length;
		in->data = need(realloc(in->data, in->room));
	}
	in->size = at->done >= 8 ? at->length : 0;
	return at->done >= 8 && at->done == at->length + 8;
}

/* Send each process its buffer of `out`, which is empty then, and receive one from each into `in`. */
static void exchange(struct buffer *out, struct buffer *in)
{
	struct progress sending[MOST] = {{0, 0}}, receiving[MOST] = {{0, 0}};
	struct pollfd wait[MOST];
	int left = 0;

	for (int other = 0; other < count; other++) {
		wait[other] = (struct pollfd){.fd = other == rank ? -1 : peer[other], .events = POLLIN | POLLOUT};
		sending[other].length = out[other].size;
		left += other == rank ? 0 : 2;
	}
	in[rank].size = 0;
	append(&in[rank], out[rank].data, out[rank].size);
	while (left) {
		if (poll(wait, count, -1) < 0)
			fail("cannot wait");
		for (int other = 0; other < count; other++) {
			if (wait[other].revents & POLLOUT && send_some(other, &sending[other], &out[other])) {
				wait[other].events &= ~POLLOUT;
				left--;
			}
			if (wait[other].revents & (POLLIN | POLLHUP) && receive_some(other, &receiving[other], &in[other])) {
				wait[other].events &= ~POLLIN;
				left--;
			}
			if (!wait[other].events)
				wait[other].fd = -1;
		}
	}
	for (int other = 0; other < count; other++)
		out[other].size = 0;
}

static uint64_t sum(uint64_t own)
{
	static struct buffer out[MOST], in[MOST];
	uint64_t all = 0, one;

	for (int other = 0; other < count; other++)
		append(&out[other], &own, sizeof(own));
	exchange(out, in);
	for (int other = 0; other < count; other++) {
		memcpy(&one, in[other].data, sizeof(one));
		all += one;
	}
	return all;
}

/* --- the graph --------------------------------------------------------------------------------------------------- */

static uint64_t random_of(uint64_t *state) /* splitmix64 */
{
	uint64_t x = *state += 0x9e3779b97f4a7c15;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	return x ^ x >> 31;
}

static uint32_t scrambled(uint32_t vertex, int scale) /* a permutation: vertices of a high degree are everywhere */
{
	for (int turn = 0; turn < 2; turn++) {
		vertex = vertex * 0x9e3779b1u & (vertices - 1);
		vertex ^= vertex >> (scale + 1) / 2;
	}
	return vertex;
}

static void make_edge(uint64_t number, int scale, uint32_t *one, uint32_t *two)
{
	uint64_t state = number * 0xd1342543de82ef95 + 1;

	*one = *two = 0;
	for (int bit = 0; bit < scale; bit++) {
		uint32_t chance = random_of(&state) >> 32;
		int quadrant = chance < 0.57 * UINT32_MAX ? 0 : chance < 0.76 * UINT32_MAX ? 1 : chance < 0.95 * UINT32_MAX ? 2 : 3;

		*one = *one << 1 | quadrant >> 1;
		*two = *two << 1 | (quadrant & 1);
	}
	*one = scrambled(*one, scale);
	*two = scrambled(*two, scale);
}

static uint32_t own_vertices;
static uint32_t *first, *neighbour; /* of each own vertex, one after the other */

static void make_graph(int scale, uint64_t edges)
{
	struct buffer out[MOST] = {{0}}, in[MOST] = {{0}};
	uint32_t one, two, *next;

	for (uint64_t number = rank; number < edges; number += count) {
		make_edge(number, scale, &one, &two);
		if (one != two) {
			tell(out, one, two);
			tell(out, two, one);
		}
	}
	exchange(out, in);
	own_vertices = (vertices - rank + count - 1) / count;
	first = need(calloc(own_vertices + 2, sizeof(*first)));
	for (int from = 0; from < count; from++)
		for (size_t at = 0; at < in[from].size; at += sizeof(struct pair))
			first[((struct pair *)(in[from].data + at))->to / count + 2]++;
	for (uint32_t vertex = 2; vertex < own_vertices + 2; vertex++)
		first[vertex] += first[vertex - 1];
	neighbour = need(malloc((first[own_vertices + 1] + 1) * sizeof(*neighbour)));
	next = first + 1; /* afterwards, `first` is as it is to be */
	for (int from = 0; from < count; from++) {
		for (size_t at = 0; at < in[from].size; at += sizeof(struct pair)) {
			struct pair *pair = (struct pair *)(in[from].data + at);

			neighbour[next[pair->to / count]++] = pair->about;
		}
		free(in[from].data);
		free(out[from].data);
	}
}

/* --- the search -------------------------------------------------------------------------------------------------- */

static struct buffer out[MOST], in[MOST];
static uint32_t *parent, *frontier, *following;
static int32_t *level;

static void search(uint32_t root)
{
	uint32_t size = 0;

	for (uint32_t vertex = 0; vertex < own_vertices; vertex++)
		level[vertex] = -1;
	if (root % count == (uint32_t)rank) {
		frontier[size++] = root / count;
		level[root / count] = 0;
		parent[root / count] = root;
	}
	for (int32_t depth = 1; sum(size); depth++) {
		uint32_t *swap = frontier, found = 0;

		for (uint32_t at = 0; at < size; at++)
			for (uint32_t edge = first[frontier[at]]; edge < first[frontier[at] + 1]; edge++)
				tell(out, neighbour[edge], frontier[at] * count + rank);
		exchange(out, in);
		for (int from = 0; from < count; from++) {
			for (size_t at = 0; at < in[from].size; at += sizeof(struct pair)) {
				struct pair *pair = (struct pair *)(in[from].data + at);
				uint32_t vertex = pair->to / count;

				if (level[vertex] < 0) {
					level[vertex] = depth;
					parent[vertex] = pair->about;
					following[found++] = vertex;
				}
			}
		}
		frontier = following;
		following = swap;
		size = found;
	}
}

/* Ask the owner of each parent whether it is one level above. */
static void validate(uint32_t root)
{
	uint64_t wrong = 0;

	for (uint32_t vertex = 0; vertex < own_vertices; vertex++)
		if (level[vertex] > 0)
			tell(out, parent[vertex], level[vertex]);
		else if (level[vertex] == 0)
			wrong += vertex * count + rank != root;
	exchange(out, in);
	for (int from = 0; from < count; from++) {
		for (size_t at = 0; at < in[from].size; at += sizeof(struct pair)) {
			struct pair *pair = (struct pair *)(in[from].data + at);

			wrong += level[pair->to / count] != (int32_t)pair->about - 1;
		}
	}
	if (sum(wrong)) {
		errno = EBADMSG;
		fail("a search is wrong");
	}
}

int main(int argc, char **argv)
{
	uint64_t edges = 0, levels = 0, state = 1;
	double seconds = 0;
	int scale, searches;

	if (argc < 7 || argc - 6 > MOST) {
		fprintf(stderr, "usage: bfs SCALE EDGES SEARCHES RANK PORT ADDRESS...\n");
		return 2;
	}
	scale = atoi(argv[1]);
	searches = atoi(argv[3]);
	rank = atoi(argv[4]);
	count = argc - 6;
	vertices = 1u << scale;
	if (scale < 2 || scale > 24 || rank < 0 || rank >= count) {
		fprintf(stderr, "bfs: a scale is 2 to 24, and a rank below the number of addresses\n");
		return 2;
	}
	connect_all(atoi(argv[5]), argv + 6);
	make_graph(scale, (uint64_t)vertices * atoi(argv[2]));
	level = need(malloc((own_vertices + 1) * sizeof(*level)));
	parent = need(malloc((own_vertices + 1) * sizeof(*parent)));
	frontier = need(malloc((own_vertices + 1) * sizeof(*frontier)));
	following = need(malloc((own_vertices + 1) * sizeof(*following)));
	for (int made = 0; made < searches;) {
		uint32_t root = random_of(&state) & (vertices - 1), at = root / count;
		int own = root % count == (uint32_t)rank;
		double began;

		if (!sum(own ? first[at + 1] - first[at] : 0))
			continue; /* it has no edge */
		began = now();
		search(root);
		sum(0);
		seconds += now() - began;
		validate(root);
		for (uint32_t vertex = 0; vertex < own_vertices; vertex++) {
			levels += level[vertex] > 0 ? level[vertex] : 0;
			edges += level[vertex] >= 0 ? first[vertex + 1] - first[vertex] : 0;
		}
		made++;
	}
	edges = sum(edges) / 2;
	levels = sum(levels);
	if (!rank)
		printf("searches=%d edges=%llu seconds=%.3f levels=%llu\n", searches, (unsigned long long)edges, seconds,
		       (unsigned long long)levels);
	return 0;
}
