/*
 * Runs a task's command in a VM of its job: mventer AGENT JOB VM command|script|step ARGV...
 *
 * VM is the number of the VM among those of the job on this node, from 0 on. Where there is no SPANK plugin, `step` is a
 * command of a step that multiverse-vm is the task of: slurmstepd has run its prologs on the node.
 *
 * The SPANK plugin executes this program as the task: as the user, in the task's directory, environment and limits. It
 * gets a connection to the guest from the agent of the host, which knows the user from the socket, sends the command,
 * and then carries input, output, signals and the exit status. It ends as the command has ended in the guest.
 *
 * The frames of the connection are described in src/multiverse/guest/agent/tasks.py.
 */
#define _GNU_SOURCE
#include "mventer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define SCOPE_FIRST '1'   /* a signal for the command alone */
#define USERS_PROLOG "SLURM_MULTIVERSE_TASK_PROLOG" /* of srun --task-prolog: see multiverse.c */
#define SCOPE_ALL 'a'     /* a signal for all processes of the task */

const char *agent_path, *job_id, *vm_index;
int guest = -1, machine, is_step;
char commands[PATH_MAX];
static char site_prolog[PATH_MAX]; /* TaskProlog of slurm.conf */
static int signals[2]; /* a pipe of pairs: signal, scope */
static int is_terminal;
static struct termios before;

static void leave(int code)
{
	if (is_terminal)
		tcsetattr(0, TCSADRAIN, &before);
	_exit(code);
}

_Noreturn void fail(const char *format, ...)
{
	va_list arguments;

	fprintf(stderr, "multiverse: ");
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, "\n");
	fflush(stderr);
	leave(1);
	abort();
}

/* --- frames ------------------------------------------------------------------------------------------------------- */

static void send_all(const void *data, size_t length)
{
	const char *next = data;

	while (length) {
		ssize_t sent = send(guest, next, length, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0)
			fail("the connection to the VM of this job broke: %s", strerror(errno));
		next += sent;
		length -= (size_t)sent;
	}
}

void send_frame(char type, const void *data, size_t length)
{
	char head[5] = {type};
	uint32_t size = htonl((uint32_t)length);

	memcpy(head + 1, &size, 4);
	send_all(head, sizeof head);
	send_all(data, length);
}

static void send_text(char type, const char *text)
{
	send_frame(type, text, strlen(text));
}

/* --- the agent ---------------------------------------------------------------------------------------------------- */

static void waited_too_long(int number)
{
	static const char text[] = "multiverse: this task cannot enter its VM: the agent of this host gave no answer within 60 s\n";

	(void)number;
	if (write(2, text, sizeof text - 1) < 0)
		_exit(2);
	_exit(1);
}

/* Asks the agent for a connection to the VM of the job. With it come the directory of Slurm's commands and
 * the site's TaskProlog. */
void connect_guest(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	char request[64], answer[2 * PATH_MAX] = "", *prolog;
	union { struct cmsghdr head; char space[CMSG_SPACE(2 * sizeof(int))]; } control;
	struct iovec part = {.iov_base = answer, .iov_len = sizeof answer - 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	struct cmsghdr *head;
	ssize_t got;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), both[2];

	snprintf(address.sun_path, sizeof address.sun_path, "%s", agent_path);
	snprintf(request, sizeof request, "enter job=%s vm=%s\n", job_id, vm_index);
	signal(SIGALRM, waited_too_long);
	alarm(60); /* the agent's own limit is shorter */
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) ||
	    send(fd, request, strlen(request), MSG_NOSIGNAL) < 0)
		fail("the agent of this host does not answer at %s: %s", agent_path, strerror(errno));
	while ((got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
		continue;
	alarm(0);
	close(fd);
	answer[got > 0 ? got : 0] = 0;
	answer[strcspn(answer, "\n")] = 0;
	if (strncmp(answer, "ok", 2) || (answer[2] && answer[2] != ' '))
		fail("this task cannot enter its VM: %s",
		     !strncmp(answer, "error ", 6) ? answer + 6 : "the agent of this host ended while it was asked");
	head = CMSG_FIRSTHDR(&message);
	if (!head || head->cmsg_type != SCM_RIGHTS || head->cmsg_len != CMSG_LEN(sizeof both))
		fail("this task cannot enter its VM: the agent of this host gave no connection");
	memcpy(both, CMSG_DATA(head), sizeof both);
	guest = both[0];
	machine = both[1];
	if ((prolog = strstr(answer, " prolog="))) {
		*prolog = 0;
		snprintf(site_prolog, sizeof site_prolog, "%s", prolog + 8);
	}
	snprintf(commands, sizeof commands, "%s", answer + 2 + (answer[2] == ' '));
}

/* --- the command -------------------------------------------------------------------------------------------------- */

static void send_window(char type)
{
	struct winsize window;
	char text[32];

	if (!ioctl(0, TIOCGWINSZ, &window)) {
		snprintf(text, sizeof text, "%u %u", window.ws_row, window.ws_col);
		send_text(type, text);
	}
}

/* What was to be the soft limit by `srun --propagate` or PropagateResourceLimits. slurmstepd sets it after task_init, and
 * takes the variable away (slurmstepd/ulimits.c). */
static void propagate(int which, struct rlimit *limit)
{
	/* get_slurm_rlimits_info() in slurm_rlimits_info.c has the same names. */
	static const struct { int which; const char *variable; } all[] = {
		{RLIMIT_CPU, "SLURM_RLIMIT_CPU"}, {RLIMIT_FSIZE, "SLURM_RLIMIT_FSIZE"}, {RLIMIT_DATA, "SLURM_RLIMIT_DATA"},
		{RLIMIT_STACK, "SLURM_RLIMIT_STACK"}, {RLIMIT_CORE, "SLURM_RLIMIT_CORE"}, {RLIMIT_RSS, "SLURM_RLIMIT_RSS"},
		{RLIMIT_NPROC, "SLURM_RLIMIT_NPROC"}, {RLIMIT_NOFILE, "SLURM_RLIMIT_NOFILE"},
		{RLIMIT_MEMLOCK, "SLURM_RLIMIT_MEMLOCK"}, {RLIMIT_AS, "SLURM_RLIMIT_AS"},
	};

	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		const char *text = all[i].which == which ? getenv(all[i].variable) : NULL;
		unsigned long long wanted;
		int asked;
		char *end;

		if (!text)
			continue;
		asked = *text == 'U'; /* the user gave --propagate */
		wanted = strtoull(text + asked, &end, 10);
		if (end != text + asked && !*end) {
			if (asked && wanted > limit->rlim_max)
				fprintf(stderr, "multiverse: cannot propagate %s: it is above the node's\n", all[i].variable + 6);
			limit->rlim_cur = wanted < limit->rlim_max ? wanted : limit->rlim_max;
		}
		unsetenv(all[i].variable);
	}
}

static void send_limits(void)
{
	char text[80];

	for (int which = 0; which < RLIM_NLIMITS; which++) {
		struct rlimit limit;

		if (getrlimit(which, &limit))
			continue;
		propagate(which, &limit);
		/* -1 for RLIM_INFINITY, as Python's resource module has it. */
		snprintf(text, sizeof text, "%d %lld %lld", which, (long long)limit.rlim_cur, (long long)limit.rlim_max);
		send_text('L', text);
	}
}

/* Sends a frame of a file of this host: its path, a zero byte, and its content. */
static void send_file(char type, const char *what, const char *path)
{
	size_t room = 4096, used = strlen(path) + 1;
	char *data = malloc(room + LONGEST);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got;

	if (fd < 0 || !data || used > room)
		fail("cannot read the %s %s: %s", what, path, strerror(errno));
	memcpy(data, path, used);
	while ((got = read(fd, data + used, 65536)) > 0 || (got < 0 && errno == EINTR)) {
		used += got > 0 ? (size_t)got : 0;
		if (used > LONGEST - 65536)
			fail("the %s %s is too large for a VM: at most %d bytes", what, path, LONGEST - 131072);
	}
	if (got < 0) /* a part of it must not run */
		fail("cannot read the %s %s: %s", what, path, strerror(errno));
	close(fd);
	send_frame(type, data, used);
	free(data);
}

/* The guest runs it before the command. As slurmstepd does, a task goes on without one that it may not run. */
static void send_prolog(const char *path)
{
	if (!path || !*path)
		return;
	if (access(path, R_OK | X_OK))
		fprintf(stderr, "multiverse: cannot run the task prolog %s: %s\n", path, strerror(errno));
	else
		send_file('P', "task prolog", path);
}

static void send_command(int is_script, char *argv[])
{
	char text[4096];
	mode_t mask = umask(0);

	umask(mask);
	snprintf(text, sizeof text, "%o", (unsigned)mask);
	send_text('U', text);
	if (getcwd(text, sizeof text))
		send_text('C', text);
	send_limits();
	if (is_script) /* a file of slurmd's on this host: the guest gets a copy at the same path */
		send_file('F', "batch script", argv[0]);
	if (!is_step) {
		send_prolog(site_prolog);
		send_prolog(getenv(USERS_PROLOG));
	}
	unsetenv(USERS_PROLOG);
	for (char **each = environ; *each; each++)
		send_text('E', strncmp(*each, KEPT_PREFIX, strlen(KEPT_PREFIX)) ? *each : *each + strlen(KEPT_PREFIX));
	for (char **each = argv; *each; each++)
		send_text('A', *each);
	if (is_terminal)
		send_window('T');
	announce_stream();
	send_frame('X', NULL, 0);
}

/* --- signals ------------------------------------------------------------------------------------------------------ */

static void note(int number, char scope)
{
	char both[2] = {(char)number, scope};

	if (write(signals[1], both, sizeof both) < 0)
		return; /* nobody reads any more */
}

static void caught(int number)
{
	int kept = errno;

	note(number, SCOPE_FIRST);
	errno = kept;
}

/*
 * Slurm sends a signal to all processes of a step, or (scancel --batch, sbatch --signal=B:) to the batch script's shell
 * alone. Here the step has two processes, this one and a child that only waits: what the child gets too is for all
 * processes in the guest.
 */
static void start_witness(const sigset_t *all)
{
	pid_t parent = getpid(), child = fork();

	if (child)
		return;
	close(guest);
	close(machine);
	close_streams();
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(0);
	for (int fd = 0; fd < 3; fd++)
		close(fd);
	for (;;) {
		int number = sigwaitinfo(all, NULL);

		if (number > 0 && number != SIGCHLD)
			note(number, SCOPE_ALL);
	}
}

static void catch_signals(void)
{
	struct sigaction action = {.sa_handler = caught};
	sigset_t all;

	if (pipe2(signals, O_CLOEXEC | O_NONBLOCK))
		fail("cannot make a pipe: %s", strerror(errno));
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	start_witness(&all);
	for (int number = 1; number < NSIG; number++)
		if (number != SIGCHLD && number != SIGPIPE && number != SIGSEGV && number != SIGBUS && number != SIGTTIN &&
		    number != SIGTTOU)
			sigaction(number, &action, NULL); /* those that cannot be caught stay as they are */
	signal(SIGPIPE, SIG_IGN);
	signal(SIGTTOU, SIG_IGN);
	sigemptyset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
}

static void forward_signals(void)
{
	char both[2];

	while (read(signals[0], both, sizeof both) == sizeof both) {
		if (both[0] == SIGWINCH)
			send_window('W');
		else
			send_frame('S', both, sizeof both);
	}
}

/* --- input, output and the end ------------------------------------------------------------------------------------ */

static char buffer[LONGEST + 5]; /* a frame from the guest, as far as it has come */
static size_t filled;
static const char *output; /* what is still to be written of a frame */
static size_t output_length;
static int output_fd;
static size_t credit = 1 << 16; /* bytes of input that the guest has room for */

/* Ends this process as the command ended. */
static _Noreturn void end_as(int status)
{
	end_commands();
	if (WIFSIGNALED(status)) {
		struct rlimit none = {0, 0};

		if (is_terminal)
			tcsetattr(0, TCSADRAIN, &before);
		setrlimit(RLIMIT_CORE, &none); /* the command's memory was in the guest */
		signal(WTERMSIG(status), SIG_DFL);
		raise(WTERMSIG(status));
		leave(128 + WTERMSIG(status));
	}
	leave(WEXITSTATUS(status));
	abort();
}

uint32_t number_at(const char *data)
{
	uint32_t found;

	memcpy(&found, data, 4);
	return ntohl(found);
}

static void take_frame(char type, const char *data, size_t length)
{
	if (type == 'O' || type == 'D') {
		output = data;
		output_length = length;
		output_fd = type == 'O' ? 1 : 2;
	} else if (type == 'K' && length == 4) {
		credit += number_at(data);
	} else if (type == 'Q' && length == 4) {
		end_as((int)number_at(data));
	} else if (type == 'V') {
		want_command(data, length);
	} else if (type == 'J') {
		take_stream(data, length);
	} else if (type == 'M') {
		fail("%.*s", (int)length, data);
	}
}

/* Takes the frames that are complete, up to one with output: that is written first. */
static void take_frames(void)
{
	static size_t taken; /* the frame whose output was written stays in the buffer until then */

	if (output_length)
		return;
	memmove(buffer, buffer + taken, filled -= taken);
	taken = 0;
	while (!output_length && filled - taken >= 5) {
		size_t length = number_at(buffer + taken + 1);

		if (length > LONGEST)
			fail("the VM of this job sends what makes no sense");
		if (filled - taken < length + 5)
			break;
		take_frame(buffer[taken], buffer + taken + 5, length);
		taken += length + 5;
	}
	if (!output_length && taken) {
		memmove(buffer, buffer + taken, filled -= taken);
		taken = 0;
	}
}

static void receive(void)
{
	ssize_t got = recv(guest, buffer + filled, sizeof buffer - filled, 0);

	if (got < 0 && errno == EINTR)
		return;
	if (got <= 0)
		fail("the VM of this job closed the connection%s%s", got < 0 ? ": " : "", got < 0 ? strerror(errno) : "");
	filled += (size_t)got;
	take_frames();
}

static void write_output(void)
{
	/* A pipe that poll(2) calls ready takes as much without blocking, so signals are never held up for long. */
	ssize_t done = write(output_fd, output, output_length < 4096 ? output_length : 4096);

	if (done < 0 && (errno == EINTR || errno == EAGAIN))
		return;
	if (done < 0)
		done = (ssize_t)output_length; /* nobody reads it: the command goes on, as its output has */
	output += done;
	output_length -= (size_t)done;
	take_frames();
}

static int send_input(void)
{
	char data[8192];
	ssize_t got = read(0, data, credit < sizeof data ? credit : sizeof data);

	if (got < 0 && (errno == EINTR || errno == EAGAIN))
		return 1;
	if (got <= 0) {
		send_frame('Z', NULL, 0);
		return 0;
	}
	credit -= (size_t)got;
	send_frame('I', data, (size_t)got);
	return 1;
}

static _Noreturn void carry(void)
{
	int has_input = 1;

	for (;;) {
		struct pollfd ready[4 + COMMANDS_AT_ONCE + STREAMS] = {
			{.fd = signals[0], .events = POLLIN},
			{.fd = output_length ? output_fd : guest, .events = output_length ? POLLOUT : POLLIN},
			{.fd = has_input && credit ? 0 : -1, .events = POLLIN},
			{.fd = machine, .events = POLLIN},
		};

		watch_commands(ready + 4);
		watch_streams(ready + 4 + COMMANDS_AT_ONCE);
		if (poll(ready, 4 + COMMANDS_AT_ONCE + STREAMS, -1) < 0) {
			if (errno != EINTR)
				fail("poll: %s", strerror(errno));
			continue;
		}
		if (ready[0].revents)
			forward_signals();
		if (ready[1].revents) {
			if (output_length)
				write_output();
			else
				receive();
		} else if (ready[3].revents) {
			fail("the VM of this job has ended; did the job need more memory than it has (--mem)?");
		}
		if (ready[2].revents && credit)
			has_input = send_input();
		tend_streams(ready + 4 + COMMANDS_AT_ONCE);
		tend_commands();
	}
}

int main(int count, char *argv[])
{
	struct termios raw;

	if (count < 6) {
		fprintf(stderr, "usage: mventer AGENT JOB VM command|script|step ARGV...\n"
			"The SPANK plugin of Multiverse runs it, or multiverse-vm.\n");
		return 2;
	}
	agent_path = argv[1];
	job_id = argv[2];
	vm_index = argv[3];
	is_step = !strcmp(argv[4], "step");
	find_streams(); /* first: a variable of another step might name a descriptor that is opened here */
	connect_guest();
	is_terminal = isatty(0) && isatty(1) && !tcgetattr(0, &before);
	catch_signals();
	send_command(!strcmp(argv[4], "script"), argv + 5);
	if (is_terminal) { /* the terminal in the guest does what this one does for a command here */
		raw = before;
		cfmakeraw(&raw);
		tcsetattr(0, TCSADRAIN, &raw);
	}
	carry();
}
