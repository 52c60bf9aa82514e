/*
 * Slurm's commands, which processes of the task in the guest ask for: srun, squeue and the like.
 *
 * A guest has no key by which Slurm would know its user. In its place mventer, which is a process of the user in the
 * job's step, runs the commands of a fixed list from the site's own directory, and no other program. Each has a process
 * of its own with a connection of its own to the program in the guest that stands for the command. The two speak the
 * frames of src/multiverse/guest/agent/tasks.py with the sides exchanged: the guest describes the command and sends its
 * input and signals, and gets its output and wait status.
 */
#define _GNU_SOURCE
#include "mventer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LONGEST_NAME 32       /* bytes of what the guest names a request by */
#define WAITING 1024          /* requests that wait for their turn */
#define DESCRIPTION (4 << 20) /* bytes of arguments and environment; more than the kernel takes */
#define ROOM (1 << 16)        /* bytes of input that the guest may send unasked: CREDIT of the program there */
#define CHUNK (1 << 13)
#define DESCRIPTION_LIMIT 30  /* seconds for the guest to describe the command */
#define GRACE 10000           /* ms for a command to end after SIGTERM: srun ends its step then */
#define DIRECT_LIMIT 10       /* seconds in which a signal to all comes from the guest, too */
#define LINGER 10000          /* ms for the guest to close its end after the last frame */
#define OUTPUT_LIMIT 5000     /* ms for the output to end after the command */

/* salloc is absent, because it runs its command where it is started. Kept equal to guest/slurm_commands.py. */
static const char *const names[] = {
	"sacct", "sacctmgr", "sattach", "sbatch", "scancel", "scontrol", "sinfo", "sprio",
	"squeue", "sreport", "srun", "sshare", "sstat",
};

/* Variables that make srun run a program here, and the one that says which Slurm this is. */
static const char *const dropped[] = {"SLURM_PROLOG=", "SLURM_EPILOG=", "SLURM_CONF="};

/* srun runs the programs of these options where it is started. Any beginning of at least so many letters is accepted. */
static const struct { const char *name; size_t least; } refused[] = {{"--prolog", 6}, {"--epilog", 4}};

int is_command(const char *name)
{
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (!strcmp(names[i], name))
			return 1;
	return 0;
}

/* --- the process of one command ----------------------------------------------------------------------------------- */

struct list { char **items; size_t count; };

static struct list arguments, variables;
static size_t described; /* bytes */
static int has_terminal;
static struct winsize window;
static struct { int is_given; rlim_t soft; } limits[RLIM_NLIMITS]; /* of the process in the guest */
static volatile sig_atomic_t direct[NSIG]; /* when this process got each signal, in seconds; 0 if it did not */

static char received[LONGEST + 5];
static size_t filled;
static char input[ROOM];
static size_t input_length, owed; /* `owed` was written of it, and the guest is not told yet */
static int input_ended;
static char unsent[2 * (CHUNK + 5) + 32];
static size_t unsent_length;
static int guest_gone;
static pid_t command;

static long long now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000LL + at.tv_nsec / 1000000;
}

static void caught(int number)
{
	direct[number] = (sig_atomic_t)(now() / 1000);
}

/* Whether Slurm has sent a signal to all processes of the step: the command has it already. */
static int had_directly(int number)
{
	int found = direct[number] && now() / 1000 - direct[number] <= DIRECT_LIMIT;

	direct[number] = 0;
	return found;
}

/* Ends when the guest has closed its end: with input unread here, what was sent last could be lost on its way. */
static _Noreturn void leave_politely(void)
{
	long long deadline = now() + LINGER, left;

	shutdown(guest, SHUT_WR);
	while ((left = deadline - now()) > 0) {
		struct pollfd ready[] = {{.fd = guest, .events = POLLIN}, {.fd = machine, .events = POLLIN}};

		if (poll(ready, 2, (int)left) > 0 && (ready[1].revents || recv(guest, received, LONGEST, MSG_DONTWAIT) <= 0))
			break;
	}
	_exit(0);
}

/* Tells the program in the guest why its command is not run, and ends. */
__attribute__((format(printf, 1, 2))) static _Noreturn void refuse(const char *format, ...)
{
	char text[1024];
	va_list values;

	va_start(values, format);
	vsnprintf(text, sizeof text, format, values);
	va_end(values);
	send_frame('M', text, strlen(text));
	leave_politely();
}

static void add(struct list *list, const char *prefix, const char *data, size_t length)
{
	size_t before = strlen(prefix);
	char *copy = malloc(before + length + 1);
	char **items = realloc(list->items, (list->count + 2) * sizeof *items);

	described += length + sizeof *items;
	if (!copy || !items || described > DESCRIPTION)
		refuse("the arguments and the environment are too long");
	memcpy(copy, prefix, before);
	memcpy(copy + before, data, length);
	copy[before + length] = 0;
	list->items = items;
	items[list->count++] = copy;
	items[list->count] = NULL;
}

static void add_variable(const char *data, size_t length)
{
	for (size_t i = 0; i < sizeof dropped / sizeof *dropped; i++)
		if (length >= strlen(dropped[i]) && !strncmp(data, dropped[i], strlen(dropped[i])))
			return;
	/* Not for the command here, but for the step that it may start: mventer there takes the prefix off again. */
	add(&variables, is_for_the_loader(data) ? KEPT_PREFIX : "", data, length);
}

/* Takes a resource limit: its number and the soft limit, -1 for none. */
static void take_limit(const char *data)
{
	long long soft;
	int which;

	if (sscanf(data, "%d %lld", &which, &soft) == 2 && which >= 0 && which < RLIM_NLIMITS) {
		limits[which].is_given = 1;
		limits[which].soft = soft < 0 ? RLIM_INFINITY : (rlim_t)soft;
	}
}

/* The command gets the soft limits of the process in the guest, as far as this host allows: srun propagates its own. */
static void set_limits(void)
{
	for (int which = 0; which < RLIM_NLIMITS; which++) {
		struct rlimit limit;

		if (!limits[which].is_given || getrlimit(which, &limit))
			continue;
		limit.rlim_cur = limits[which].soft < limit.rlim_max ? limits[which].soft : limit.rlim_max;
		setrlimit(which, &limit);
	}
}

static void set_window(const char *data, size_t length)
{
	char text[32];
	unsigned rows, columns;

	snprintf(text, sizeof text, "%.*s", (int)(length < 31 ? length : 31), data);
	if (sscanf(text, "%u %u", &rows, &columns) == 2) {
		window.ws_row = (unsigned short)rows;
		window.ws_col = (unsigned short)columns;
	}
}

/* Takes a frame of the description. 1 at its end. */
static int describe(char type, char *data, size_t length)
{
	char kept = data[length];

	data[length] = 0; /* the next frame begins here */
	if (type == 'A') {
		add(&arguments, "", data, length);
	} else if (type == 'E') {
		add_variable(data, length);
	} else if (type == 'U') {
		umask((mode_t)strtoul(data, NULL, 8) & 0777);
	} else if (type == 'L') {
		take_limit(data);
	} else if (type == 'T') {
		has_terminal = 1;
		set_window(data, length);
	} else if (type == 'C' && chdir(data)) {
		char text[512];
		int said = snprintf(text, sizeof text, "multiverse: no directory %.400s on the node: going to / instead\n", data);

		send_frame('D', text, (size_t)said);
		if (chdir("/"))
			refuse("there is no directory /: %s", strerror(errno));
	}
	data[length] = kept;
	return type == 'X';
}

static void drop_frame(size_t length)
{
	filled -= length + 5;
	memmove(received, received + length + 5, filled);
}

/* The length of the next frame's body if all of it has come, or -1. */
static long next_frame(void)
{
	size_t length = filled >= 5 ? number_at(received + 1) : 0;

	if (length >= LONGEST)
		_exit(0); /* no program of ours */
	return filled >= 5 && filled - 5 >= length ? (long)length : -1;
}

static void read_description(void)
{
	struct timeval limit = {.tv_sec = DESCRIPTION_LIMIT};

	setsockopt(guest, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	for (;;) {
		long length;
		ssize_t got;

		while ((length = next_frame()) >= 0) {
			int ended = describe(*received, received + 5, (size_t)length);

			drop_frame((size_t)length);
			if (ended)
				return;
		}
		got = recv(guest, received + filled, sizeof received - 1 - filled, 0);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			_exit(0); /* the program in the guest was ended */
		filled += (size_t)got;
	}
}

static void check(void)
{
	const char *name = arguments.count ? arguments.items[0] : "";

	if (!is_command(name))
		refuse("%s cannot be run from the VM of a job: only srun, sbatch, squeue and the like", name);
	if (*commands != '/')
		refuse("this host runs no command of Slurm's for its VMs");
	if (is_step && !strcmp(name, "srun")) /* of sbcast, too */
		refuse("srun in the VM would run its command on the bare node: call srun multiverse-vm run in the batch file");
	for (size_t i = 1; !strcmp(name, "srun") && i < arguments.count; i++) {
		const char *each = arguments.items[i];
		size_t length = strcspn(each, "=");

		for (size_t j = 0; j < sizeof refused / sizeof *refused; j++)
			if (length >= refused[j].least && length <= strlen(refused[j].name) &&
			    !strncmp(each, refused[j].name, length))
				refuse("srun %s would run a program outside of the VM", refused[j].name);
	}
}

static _Noreturn void become(const int files[3], const char *path)
{
	sigset_t none;

	setsid();
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (has_terminal)
		ioctl(files[0], TIOCSCTTY, 0);
	for (int target = 0; target < 3; target++)
		dup2(files[target], target);
	for (int number = 1; number < NSIG; number++)
		signal(number, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	set_limits();
	execve(path, arguments.items, variables.items);
	fprintf(stderr, "multiverse: cannot execute %s on the node: %s\n", path, strerror(errno));
	fflush(stderr);
	_exit(1);
}

/* Makes what the command has for input, output and errors, and the ends that stay here. */
static int make_files(int ours[3], int theirs[3])
{
	const char *name;
	int both[2];

	if (has_terminal) {
		if ((ours[0] = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0 || grantpt(ours[0]) || unlockpt(ours[0]) ||
		    !(name = ptsname(ours[0])) || (theirs[0] = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0)
			return -1;
		theirs[1] = theirs[2] = theirs[0];
		ours[1] = ours[0];
		ours[2] = -1;
		ioctl(ours[0], TIOCSWINSZ, &window);
	} else {
		for (int i = 0; i < 3; i++) {
			if (pipe2(both, O_CLOEXEC))
				return -1;
			ours[i] = both[i ? 0 : 1];
			theirs[i] = both[i ? 1 : 0];
		}
	}
	for (int i = 0; i < 3; i++)
		if (ours[i] >= 0)
			fcntl(ours[i], F_SETFL, O_NONBLOCK);
	return 0;
}

static void start(int ours[3])
{
	int theirs[3];
	char path[4200];

	snprintf(path, sizeof path, "%s/%s", commands, arguments.items[0]);
	if (!variables.items)
		add(&variables, "", "PATH=/usr/bin:/bin", 18);
	for (char **each = environ; *each; each++)
		if (!strncmp(*each, "SLURM_CONF=", 11))
			add(&variables, "", *each, strlen(*each));
	if (make_files(ours, theirs) || (command = fork()) < 0)
		refuse("cannot start %s on the node: %s", arguments.items[0], strerror(errno));
	if (!command)
		become(theirs, path);
	for (int i = 0; i < (has_terminal ? 1 : 3); i++)
		close(theirs[i]);
}

/* --- carrying ----------------------------------------------------------------------------------------------------- */

static void put(char type, const void *data, size_t length)
{
	uint32_t size = htonl((uint32_t)length);

	unsent[unsent_length] = type;
	memcpy(unsent + unsent_length + 1, &size, 4);
	memcpy(unsent + unsent_length + 5, data, length);
	unsent_length += length + 5;
}

static void push(void)
{
	ssize_t sent = unsent_length ? send(guest, unsent, unsent_length, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;

	if (sent < 0 && errno != EAGAIN && errno != EINTR)
		guest_gone = 1;
	if (sent > 0)
		memmove(unsent, unsent + sent, unsent_length -= (size_t)sent);
}

/* What came from the guest once the command runs. */
static void take(char type, const char *data, size_t length, int terminal)
{
	int number = length ? data[0] : 0;

	if (type == 'I' && length <= sizeof input - input_length) {
		memcpy(input + input_length, data, length);
		input_length += length;
	} else if (type == 'I') {
		guest_gone = 1; /* more than there was room for: no program of ours */
	} else if (type == 'Z') {
		input_ended = 1;
	} else if (type == 'S' && number > 0 && number < NSIG) {
		if (command && !had_directly(number))
			kill(command, number);
	} else if (type == 'W' && has_terminal) {
		set_window(data, length);
		ioctl(terminal, TIOCSWINSZ, &window);
	}
}

static void receive(int terminal)
{
	ssize_t got = recv(guest, received + filled, sizeof received - 1 - filled, MSG_DONTWAIT);
	long length;

	if (!got || (got < 0 && errno != EAGAIN && errno != EINTR))
		guest_gone = 1;
	filled += got > 0 ? (size_t)got : 0;
	while (!guest_gone && (length = next_frame()) >= 0) {
		take(*received, received + 5, (size_t)length, terminal);
		drop_frame((size_t)length);
	}
}

static void write_input(int *fd)
{
	ssize_t done = *fd >= 0 && input_length ? write(*fd, input, input_length) : 0;

	if (*fd < 0 || (done < 0 && errno != EAGAIN && errno != EINTR))
		done = (ssize_t)input_length; /* nobody reads it */
	if (done > 0) {
		memmove(input, input + done, input_length -= (size_t)done);
		owed += (size_t)done;
	}
	if (input_ended && !input_length && *fd >= 0) {
		if (!has_terminal)
			close(*fd);
		*fd = -1;
	}
}

static void read_output(int *fd, char type)
{
	char data[CHUNK];
	ssize_t got = read(*fd, data, sizeof data);

	if (got > 0) {
		put(type, data, (size_t)got);
	} else if (!got || (errno != EAGAIN && errno != EINTR)) {
		if (!has_terminal)
			close(*fd);
		*fd = -1;
	}
}

/* Ends the command because nobody waits for it any more. */
static _Noreturn void end_command(int process)
{
	struct pollfd ready = {.fd = process, .events = POLLIN};
	long long deadline = now() + GRACE, left;

	if (!command)
		_exit(0);
	kill(command, SIGCONT);
	kill(command, SIGTERM);
	while ((left = deadline - now()) > 0 && poll(&ready, 1, (int)left) < 0 && errno == EINTR)
		continue;
	kill(command, SIGKILL);
	waitpid(command, NULL, 0);
	_exit(0);
}

/* Waits for what there is to do, and does it. `files` are those of `make_files`. */
static void carry_on(int files[3], int process, int terminal, int timeout)
{
	int may_read = !unsent_length;
	struct pollfd ready[] = {
		{.fd = guest, .events = (short)(POLLIN | (unsent_length ? POLLOUT : 0))},
		{.fd = input_length ? files[0] : -1, .events = POLLOUT},
		{.fd = may_read ? files[1] : -1, .events = POLLIN},
		{.fd = may_read ? files[2] : -1, .events = POLLIN},
		{.fd = process, .events = POLLIN},
		{.fd = machine, .events = POLLIN},
	};

	if (poll(ready, 6, timeout) < 0)
		return; /* a signal */
	if (ready[5].revents)
		guest_gone = 1;
	if (ready[0].revents & ~POLLOUT)
		receive(terminal);
	write_input(&files[0]);
	if (ready[2].revents && files[1] >= 0)
		read_output(&files[1], 'O');
	if (ready[3].revents && files[2] >= 0)
		read_output(&files[2], 'D');
	if (owed && may_read) {
		uint32_t count = htonl((uint32_t)owed);

		put('K', &count, 4);
		owed = 0;
	}
	push();
}

static _Noreturn void carry_command(int files[3], pid_t parent)
{
	int terminal = has_terminal ? files[0] : -1, status = 0;
	int process = (int)syscall(SYS_pidfd_open, command, 0);
	long long deadline = 0;
	uint32_t number;

	receive(terminal); /* there may be frames that came with the description */
	write_input(&files[0]);
	for (;;) {
		if (guest_gone || getppid() != parent)
			end_command(process);
		if (command && waitpid(command, &status, WNOHANG) == command) {
			command = 0;
			deadline = now() + OUTPUT_LIMIT;
		}
		/* Then only what is in the pipes is still to be sent, however long the guest takes for it. */
		if (deadline && !unsent_length && ((files[1] < 0 && files[2] < 0) || now() > deadline))
			break;
		carry_on(files, deadline ? -1 : process, terminal, deadline && !unsent_length ? 100 : 1000);
	}
	number = htonl((uint32_t)status);
	put('Q', &number, 4);
	while (unsent_length && !guest_gone) {
		struct pollfd ready[] = {{.fd = guest, .events = POLLOUT}, {.fd = machine, .events = POLLIN}};

		if (poll(ready, 2, 1000) > 0 && ready[1].revents)
			break;
		push();
	}
	leave_politely();
}

/* In a process of its own: gets a connection for what the guest calls `name`, and runs the command that comes on it. */
static _Noreturn void serve(const char *name, pid_t parent)
{
	struct sigaction action = {.sa_handler = caught};
	int files[3], null;

	prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (getppid() != parent)
		_exit(1);
	close(guest); /* else the task's own connection would outlive mventer */
	close(machine);
	close_streams();
	for (int number = 1; number < NSIG; number++)
		if (number != SIGCHLD && number != SIGPIPE)
			sigaction(number, &action, NULL);
	if ((null = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0) {
		dup2(null, 0);
		dup2(null, 1); /* errors go where those of the task go */
	}
	connect_guest();
	send_frame('V', name, strlen(name));
	read_description();
	check();
	start(files);
	carry_command(files, parent);
}

/* --- in the task's own process ------------------------------------------------------------------------------------ */

static struct { pid_t pid; int process; char name[LONGEST_NAME + 1]; } running[COMMANDS_AT_ONCE];
static char waiting[WAITING][LONGEST_NAME + 1];
static size_t first, count;

/* Notes that the guest asks for a connection. */
void want_command(const char *name, size_t length)
{
	if (length > LONGEST_NAME || count == WAITING) {
		send_frame('N', name, length <= LONGEST_NAME ? length : 0);
		return;
	}
	snprintf(waiting[(first + count++) % WAITING], LONGEST_NAME + 1, "%.*s", (int)length, name);
}

/* What poll(2) is to watch: the ends of the commands' processes. */
void watch_commands(struct pollfd ready[COMMANDS_AT_ONCE])
{
	for (int i = 0; i < COMMANDS_AT_ONCE; i++)
		ready[i] = (struct pollfd){.fd = running[i].pid ? running[i].process : -1, .events = POLLIN};
}

static void start_one(int place)
{
	pid_t parent = getpid(), child = fork();

	if (!child)
		serve(waiting[first], parent);
	if (child < 0) {
		send_frame('N', waiting[first], strlen(waiting[first]));
	} else {
		running[place].pid = child;
		running[place].process = (int)syscall(SYS_pidfd_open, child, 0);
		memcpy(running[place].name, waiting[first], LONGEST_NAME + 1);
	}
	first = (first + 1) % WAITING;
	count--;
}

/* Collects the processes that have ended, and starts those for which there is room then. */
void tend_commands(void)
{
	for (int i = 0; i < COMMANDS_AT_ONCE; i++) {
		int status;

		if (running[i].pid && waitpid(running[i].pid, &status, WNOHANG) == running[i].pid) {
			if (status) /* it had no connection: the guest still waits */
				send_frame('N', running[i].name, strlen(running[i].name));
			close(running[i].process);
			running[i].pid = 0;
		}
		if (!running[i].pid && count)
			start_one(i);
	}
}

/* The task has ended, and with it the programs in the guest: waits for the commands here to end. */
void end_commands(void)
{
	long long deadline = now() + GRACE + 2000;

	for (int i = 0; i < COMMANDS_AT_ONCE; i++) {
		struct pollfd ready = {.fd = running[i].process, .events = POLLIN};
		long long left;

		while (running[i].pid && (left = deadline - now()) > 0 && poll(&ready, 1, (int)left) < 0 && errno == EINTR)
			continue;
	}
}
