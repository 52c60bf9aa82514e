/* Solves a linear system by conjugate gradients, in the manner of HPCG: the matrix of a 27-point stencil, 26 on the
 * diagonal and -1 beside it, is stored row by row, and the preconditioner is one symmetric Gauss-Seidel sweep. As in
 * HPCG, each part of the rows is swept by itself: here a part belongs to a thread.
 *
 *     cg NX NY NZ THREADS
 *
 * Each thread has NX x NY x NZ unknowns, one on top of the other. The solution is 1 everywhere. One line is printed:
 *
 *     unknowns=4096 threads=1 iterations=11 residual=4.1e-10 error=1.2e-09 seconds=0.010
 *
 * `residual` is relative to that of the first guess (0), and `error` the largest deviation from 1. The exit status is 1
 * if the residual is not below TOLERANCE after MOST iterations.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POINTS = 27, MOST = 200, MOST_THREADS = 64 };
static const double TOLERANCE = 1e-9;

static long rows, part;
static int threads, *count, (*column)[POINTS];
static double (*value)[POINTS], *b, *x, *r, *z, *p, *ap, sums[MOST_THREADS], residual;
static int iterations;
static pthread_barrier_t barrier;

static void build(long nx, long ny, long nz)
{
    for (long row = 0; row < rows; row++) {
        long ix = row % nx, iy = row / nx % ny, iz = row / (nx * ny);
        for (long dz = -1; dz <= 1; dz++)
            for (long dy = -1; dy <= 1; dy++)
                for (long dx = -1; dx <= 1; dx++) {
                    long jx = ix + dx, jy = iy + dy, jz = iz + dz;
                    if (jx < 0 || jx >= nx || jy < 0 || jy >= ny || jz < 0 || jz >= nz)
                        continue;
                    column[row][count[row]] = (int)(jx + nx * (jy + ny * jz));
                    value[row][count[row]++] = dx || dy || dz ? -1.0 : 26.0;
                }
        b[row] = 26.0 - (count[row] - 1);
    }
}

/* The sum of what all threads give. Every thread gets it. */
static double total(int me, double mine)
{
    double sum = 0.0;
    sums[me] = mine;
    pthread_barrier_wait(&barrier);
    for (int other = 0; other < threads; other++)
        sum += sums[other];
    pthread_barrier_wait(&barrier);
    return sum;
}

static double dot(const double *one, const double *other, long from, long to)
{
    double sum = 0.0;
    for (long row = from; row < to; row++)
        sum += one[row] * other[row];
    return sum;
}

static void relax(long row, long from, long to)
{
    double sum = r[row], diagonal = 1.0;
    for (int at = 0; at < count[row]; at++) {
        int other = column[row][at];
        if (other == row)
            diagonal = value[row][at];
        else if (other >= from && other < to)
            sum -= value[row][at] * z[other];
    }
    z[row] = sum / diagonal;
}

static void *solve(void *given)
{
    int me = (int)(long)given;
    long from = me * part, to = from + part;
    double old = 0.0, first;
    for (long row = from; row < to; row++) {
        x[row] = p[row] = 0.0;
        r[row] = b[row];
    }
    first = sqrt(total(me, dot(r, r, from, to)));
    for (int turn = 1; turn <= MOST; turn++) {
        for (long row = from; row < to; row++)
            z[row] = 0.0;
        for (long row = from; row < to; row++)
            relax(row, from, to);
        for (long row = to - 1; row >= from; row--)
            relax(row, from, to);
        double rz = total(me, dot(r, z, from, to)), beta = turn == 1 ? 0.0 : rz / old;
        for (long row = from; row < to; row++)
            p[row] = z[row] + beta * p[row];
        old = rz;
        pthread_barrier_wait(&barrier); /* the neighbours read p */
        for (long row = from; row < to; row++) {
            double sum = 0.0;
            for (int at = 0; at < count[row]; at++)
                sum += value[row][at] * p[column[row][at]];
            ap[row] = sum;
        }
        double alpha = rz / total(me, dot(p, ap, from, to));
        for (long row = from; row < to; row++) {
            x[row] += alpha * p[row];
            r[row] -= alpha * ap[row];
        }
        double now = sqrt(total(me, dot(r, r, from, to))) / first;
        if (me == 0) {
            iterations = turn;
            residual = now;
        }
        if (now < TOLERANCE)
            break;
    }
    return NULL;
}

static void *room(size_t each)
{
    void *made = calloc((size_t)rows, each);
    if (!made) {
        fprintf(stderr, "cg: no memory for %ld unknowns\n", rows);
        exit(1);
    }
    return made;
}

int main(int argc, char **argv)
{
    long size[3] = {0};
    for (int at = 0; at < 3 && argc == 5; at++)
        size[at] = atol(argv[at + 1]);
    threads = argc == 5 ? atoi(argv[4]) : 0;
    if (size[0] < 1 || size[1] < 1 || size[2] < 1 || threads < 1 || threads > MOST_THREADS) {
        fprintf(stderr, "cg: give NX NY NZ THREADS, for example: cg 16 16 16 1\n");
        return 2;
    }
    part = size[0] * size[1] * size[2];
    rows = part * threads;
    count = room(sizeof *count);
    column = room(sizeof *column);
    value = room(sizeof *value);
    double **vectors[] = {&b, &x, &r, &z, &p, &ap};
    for (size_t at = 0; at < sizeof vectors / sizeof *vectors; at++)
        *vectors[at] = room(sizeof(double));
    build(size[0], size[1], size[2] * threads);
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    struct timespec began, ended;
    pthread_t others[MOST_THREADS];
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (int other = 1; other < threads; other++)
        if (pthread_create(&others[other], NULL, solve, (void *)(long)other)) {
            fprintf(stderr, "cg: cannot start %d threads\n", threads);
            return 1;
        }
    solve((void *)0);
    for (int other = 1; other < threads; other++)
        pthread_join(others[other], NULL);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double error = 0.0;
    for (long row = 0; row < rows; row++)
        error = fmax(error, fabs(x[row] - 1.0));
    printf("unknowns=%ld threads=%d iterations=%d residual=%.1e error=%.1e seconds=%.3f\n", rows, threads, iterations,
           residual, error, (double)(ended.tv_sec - began.tv_sec) + (double)(ended.tv_nsec - began.tv_nsec) / 1e9);
    return residual < TOLERANCE ? 0 : 1;
}
