/* All-reduce of f32 by MPI, as `kolo bench comm` measures its own: one JSON row per size.
 *
 * Each iteration starts at a barrier and is timed alone; its time is that of the slowest rank. The row is the median over
 * the iterations.
 *
 *     mpicc -O2 -o mpi_all_reduce mpi_all_reduce.c && mpirun -n 2 ./mpi_all_reduce 4 1024 1048576
 *
 * With `fresh` first, each rank writes its vector anew before every call, outside the measured time.
 * With `copy` before the sizes, all ranks at once copy as many bytes as an all-reduce must read and write at the least.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES_PER_RUN = 512 << 20, ITERATIONS_MIN = 15, ITERATIONS_MAX = 4000, BATCH_BYTES_MAX = 4096, BATCH = 50 };

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static int iterations_for(long bytes) {
    long iterations = BYTES_PER_RUN / bytes;
    if (iterations < ITERATIONS_MIN) return ITERATIONS_MIN;
    return iterations > ITERATIONS_MAX ? ITERATIONS_MAX : (int)iterations;
}

static int copying, fresh;

static void work(float *data, int count) {
    if (!copying) {
        MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        return;
    }
    memcpy(data + count / 2, data, count / 2 * 4);
    memcpy(data, data + count / 2, count / 2 * 4);
}

/* Short calls are timed in batches, as the clock and the barrier would weigh more than they do. */
static double median_us(float *data, long bytes) {
    int count = (int)(bytes / 4), iterations = iterations_for(bytes), batch = bytes <= BATCH_BYTES_MAX && !fresh ? BATCH : 1;
    int samples = iterations / batch;
    double *times = malloc(sizeof(double) * samples);
    for (int sample = -samples / 10 - 1; sample < samples; sample++) {
        if (fresh) memset(data, 0, bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        for (int i = 0; i < batch; i++) work(data, count);
        double mine = (MPI_Wtime() - begin) / batch, slowest;
        MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (sample >= 0) times[sample] = slowest * 1e6;
    }
    qsort(times, samples, sizeof(double), ascending);
    double median = times[samples / 2];
    free(times);
    return median;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    fresh = argc > 1 && strcmp(argv[1], "fresh") == 0;
    copying = argc > 1 + fresh && strcmp(argv[1 + fresh], "copy") == 0;
    for (int i = 1 + fresh + copying; i < argc; i++) {
        long bytes = atol(argv[i]);
        float *data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        memset(data, 0, bytes);
        double us = median_us(data, bytes);
        if (rank == 0) {
            double bus = bytes / us / 1e3 * 2 * (ranks - 1) / ranks;
            printf("{\"op\":\"%s\",\"bytes\":%ld,\"ranks\":%d,\"transport\":\"openmpi\",\"us_median\":%.3f,\"busbw_gbps\":%.4f}\n",
                   copying ? "copy" : "all_reduce", bytes, ranks, us, bus);
            fflush(stdout);
        }
        free(data);
    }
    MPI_Finalize();
    return 0;
}
