import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.LongAdder;
import java.util.concurrent.locks.LockSupport;

/**
 * What every load in Java has: options (key=value), latencies, and windows. No class of RocketMQ: its clients do not share a class path.
 *
 * A load that has windows is driven line by line on standard input, so that its windows can stand between ours while the JVM stays warm:
 * "WARM_UP_MS MEASURE_MS" runs one window and prints one line of JSON, a Sample of tests/bench/measure.py; end of input ends. Between
 * windows the callers are parked.
 */
class Load {
    static final Map<String, String> opt = new HashMap<>();
    static final PrintStream err = System.err;
    static volatile boolean paused = true, measuring, stop;

    static String s(String k, String d) { return opt.getOrDefault(k, d); }
    static int i(String k, int d) { return opt.containsKey(k) ? Integer.parseInt(opt.get(k)) : d; }

    /** Latency histogram, 1 us linear up to 1 ms, then 512 steps per doubling. */
    static final class Hist {
        final long[] c = new long[1024 + 512 * 24];
        long n, max;
        static int slot(long us) {
            if (us < 1024) return (int) us;
            int e = 63 - Long.numberOfLeadingZeros(us) - 9;          // us>>e in [512,1024)
            return Math.min(1024 + 512 * (e - 1) + (int) ((us >> e) - 512), 1024 + 512 * 24 - 1);
        }
        static long value(int k) {
            if (k < 1024) return k;
            int e = (k - 1024) / 512 + 1;
            return (long) ((k - 1024) % 512 + 512) << e;
        }
        synchronized void add(long ns) { long us = ns / 1000; c[slot(us)]++; n++; if (us > max) max = us; }
        synchronized void clear() { java.util.Arrays.fill(c, 0); n = 0; max = 0; }
        synchronized void mergeInto(Hist o) { for (int k = 0; k < c.length; k++) o.c[k] += c[k]; o.n += n; o.max = Math.max(max, o.max); }
        double q(double p) {
            long t = (long) Math.ceil(p * n), a = 0;
            for (int k = 0; k < c.length; k++) { a += c[k]; if (a >= t) return value(k) / 1000.0; }
            return max / 1000.0;
        }
    }

    static byte[] body(int n) {
        byte[] b = new byte[n]; Random r = new Random(7);
        String a = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
        for (int k = 0; k < n; k++) b[k] = (byte) a.charAt(r.nextInt(a.length()));
        return b;
    }

    static double clientCpu() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }

    /** User and system time of the broker; a tick is 10 ms. */
    static double serverCpu() throws Exception {
        if (!opt.containsKey("serverpid")) return 0;
        String stat = new String(Files.readAllBytes(Paths.get("/proc/" + s("serverpid", "") + "/stat")));
        String[] f = stat.substring(stat.lastIndexOf(')') + 2).split(" ");
        return (Long.parseLong(f[11]) + Long.parseLong(f[12])) / 100.0;
    }

    static void print(long messages, double seconds, long errors, Hist h, double clientCpu, double serverCpu) {
        String latencies = h == null || h.n == 0 ? ""
            : String.format(Locale.ROOT, ", \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f", h.q(.5), h.q(.99), h.max / 1000.0);
        System.out.printf(Locale.ROOT, "{\"messages\": %d, \"seconds\": %.6f, \"size_bytes\": %d, \"errors\": %d%s, \"client_cpu_s\": %.4f, \"server_cpu_s\": %.4f}%n",
            messages, seconds, messages * i("size", 1024), errors, latencies, clientCpu, serverCpu);
        System.out.flush();
    }

    static void windows(LongAdder ok, LongAdder bad, List<Hist> hists) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = in.readLine()) != null; ) {
            String[] f = line.trim().split(" ");
            for (Hist h : hists) h.clear();
            paused = false;
            Thread.sleep(Long.parseLong(f[0]));
            measuring = true;
            long a = ok.sum(), b = bad.sum(), t = System.nanoTime();
            double client = clientCpu(), server = serverCpu();
            Thread.sleep(Long.parseLong(f[1]));
            measuring = false;
            long messages = ok.sum() - a, errors = bad.sum() - b;
            double seconds = (System.nanoTime() - t) / 1e9;
            client = clientCpu() - client; server = serverCpu() - server;
            paused = true;
            Thread.sleep(100);
            for (int k = 0; k < 500 && busy.get() > 0; k++) Thread.sleep(20);   // The last calls come back.
            Hist all = new Hist();
            for (Hist h : hists) h.mergeInto(all);
            print(messages, seconds, errors, all, client, server);
        }
        stop = true;
    }

    static boolean parked() {
        while (paused && !stop) LockSupport.parkNanos(2_000_000);
        return !stop;
    }

    static void read(String[] a) {
        for (int k = 1; k < a.length; k++) { int e = a[k].indexOf('='); opt.put(a[k].substring(0, e), a[k].substring(e + 1)); }
    }

    /** One call of one caller: the number of messages that it moved. */
    interface Call { int run() throws Throwable; }

    static final AtomicInteger busy = new AtomicInteger();

    /** Callers, each repeating its call: threads that are parked between windows. */
    static void callers(int threads, Call call) throws Exception {
        final LongAdder ok = new LongAdder(), bad = new LongAdder();
        final List<Hist> hists = new ArrayList<>();
        for (int k = 0; k < threads; k++) {
            final Hist h = new Hist();
            hists.add(h);
            Thread t = new Thread(() -> {
                while (parked()) {
                    final long a = System.nanoTime();
                    busy.incrementAndGet();
                    try {
                        int n = call.run();
                        if (measuring) h.add(System.nanoTime() - a);
                        ok.add(n);
                    } catch (Throwable e) {
                        if (stop) return;
                        bad.increment(); if (bad.sum() < 4) err.println(e);
                        LockSupport.parkNanos(1_000_000);
                    } finally {
                        busy.decrementAndGet();
                    }
                }
            });
            t.setDaemon(true);
            t.start();
        }
        windows(ok, bad, hists);
    }
}
