import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import java.util.concurrent.locks.LockSupport;

import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's own client under load. usage: java Bench MODE key=value...   (modes: send push e2e probe fill)
 *
 * send and e2e are driven line by line on standard input, so that their windows can stand between ours while the JVM
 * stays warm: "WARM_UP_MS MEASURE_MS" runs one window and prints one line of JSON, a Sample of tests/bench/measure.py; end of input ends.
 * Between windows the callers are parked.
 */
public class Bench {
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

    static DefaultMQProducer start(DefaultMQProducer p) throws Exception {
        p.setNamesrvAddr(s("ns", ""));
        p.setInstanceName("p" + System.nanoTime());
        p.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        p.setSendMsgTimeout(i("timeout", 5000));
        p.start();
        return p;
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
            Thread.sleep(100);                                       // The last calls come back.
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

    static void send() throws Exception {
        final String topic = s("topic", "BenchT16");
        final int threads = i("threads", 64), batch = i("batch", 1);
        final byte[] body = body(i("size", 1024));
        final LongAdder ok = new LongAdder(), bad = new LongAdder();
        final DefaultMQProducer p = start(new DefaultMQProducer("bench_producer"));
        final List<Hist> hists = new ArrayList<>();
        for (int k = 0; k < threads; k++) {
            final Hist h = new Hist();
            hists.add(h);
            Thread t = new Thread(() -> {
                while (parked()) {
                    try {
                        final long a;
                        final SendResult r;
                        if (batch > 1) {
                            List<Message> l = new ArrayList<>(batch);
                            a = System.nanoTime();                   // Making the messages counts, as on our side.
                            for (int x = 0; x < batch; x++) l.add(new Message(topic, body));
                            r = p.send(l);
                        } else {
                            a = System.nanoTime();
                            r = p.send(new Message(topic, body));
                        }
                        if (measuring) h.add(System.nanoTime() - a);
                        if (r.getSendStatus() == SendStatus.SEND_OK) ok.add(batch);
                        else { bad.increment(); if (bad.sum() < 4) err.println(r); }
                    } catch (Throwable e) {
                        if (stop) return;
                        bad.increment(); if (bad.sum() < 4) err.println(e);
                        LockSupport.parkNanos(1_000_000);
                    }
                }
            });
            t.setDaemon(true);
            t.start();
        }
        windows(ok, bad, hists);
        p.shutdown();
    }

    /** Sends `limit` messages in batches of 64 from 4 threads, as fast as it goes. */
    static void fill() throws Exception {
        final String topic = s("topic", "BenchT16");
        final byte[] body = body(i("size", 1024));
        final long limit = Long.parseLong(s("limit", "1000000"));
        final LongAdder ok = new LongAdder(), bad = new LongAdder();
        final DefaultMQProducer p = start(new DefaultMQProducer("bench_fill"));
        long t0 = System.nanoTime();
        Thread[] ts = new Thread[4];
        for (int k = 0; k < ts.length; k++) {
            ts[k] = new Thread(() -> {
                while (ok.sum() < limit && bad.sum() < 1000) try {
                    List<Message> l = new ArrayList<>(64);
                    for (int x = 0; x < 64; x++) l.add(new Message(topic, body));
                    if (p.send(l).getSendStatus() == SendStatus.SEND_OK) ok.add(64); else bad.increment();
                } catch (Throwable e) { bad.increment(); if (bad.sum() < 4) err.println(e); LockSupport.parkNanos(1_000_000); }
            });
            ts[k].start();
        }
        for (Thread t : ts) t.join();
        print(ok.sum(), (System.nanoTime() - t0) / 1e9, bad.sum(), null, clientCpu(), serverCpu());
        p.shutdown();
    }

    static DefaultMQPushConsumer pushConsumer(String group) throws Exception {
        DefaultMQPushConsumer c = new DefaultMQPushConsumer(group);
        c.setNamesrvAddr(s("ns", ""));
        c.setInstanceName("c" + System.nanoTime());
        c.setConsumeFromWhere(ConsumeFromWhere.valueOf(s("from", "CONSUME_FROM_FIRST_OFFSET")));
        c.setConsumeMessageBatchMaxSize(i("consumebatch", 1));
        c.setPullBatchSize(i("pullbatch", 32));
        c.subscribe(s("topic", "BenchT16"), "*");
        return c;
    }

    /**
     * Consumes what is stored (total messages). The result is the best their side can show: the median second of the run,
     * start and end left out.
     */
    static void push() throws Exception {
        final LongAdder n = new LongAdder(), bytes = new LongAdder();
        DefaultMQPushConsumer c = pushConsumer(s("group", "bench_push_" + System.currentTimeMillis()));
        c.registerMessageListener((MessageListenerConcurrently) (ms, ctx) -> {
            for (MessageExt m : ms) bytes.add(m.getBody().length);
            n.add(ms.size());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        c.start();
        long total = Long.parseLong(s("total", "0")), begin = System.nanoTime(), before = 0, t0 = begin;
        double client = 0, server = 0;
        List<double[]> seconds = new ArrayList<>();                  // messages, seconds, client, server
        while (n.sum() < total && System.nanoTime() - begin < i("maxsecs", 120) * 1_000_000_000L) {
            Thread.sleep(500);
            long now = n.sum(), t = System.nanoTime();
            double cc = clientCpu(), ss = serverCpu();
            if (before > 0 && now < total) seconds.add(new double[] {now - before, (t - t0) / 1e9, cc - client, ss - server});
            before = now; t0 = t; client = cc; server = ss;
        }
        seconds.sort((x, y) -> Double.compare(x[0] / x[1], y[0] / y[1]));
        if (seconds.isEmpty()) { err.println("consumed " + n.sum() + " of " + total + ", too fast or not at all"); System.exit(1); }
        double[] m = seconds.get(seconds.size() / 2);
        print((long) m[0], m[1], 0, null, m[2], m[3]);
        c.shutdown();
    }

    /** Push consumer and paced producer in one JVM; the first 8 bytes of a body hold the nanoTime at which it was meant to be sent. */
    static void e2e() throws Exception {
        final String topic = s("topic", "BenchT16");
        final int rate = i("rate", 1000), threads = i("threads", 4);
        final Hist lat = new Hist(); final LongAdder ok = new LongAdder(), bad = new LongAdder();
        opt.putIfAbsent("from", "CONSUME_FROM_LAST_OFFSET");
        DefaultMQPushConsumer c = pushConsumer("bench_e2e_" + System.currentTimeMillis());
        c.registerMessageListener((MessageListenerConcurrently) (ms, ctx) -> {
            long now = System.nanoTime();
            for (MessageExt m : ms) { long t = ByteBuffer.wrap(m.getBody()).getLong(); if (measuring && t > 0) lat.add(now - t); }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        c.start();
        Thread.sleep(4000);
        DefaultMQProducer p = start(new DefaultMQProducer("bench_e2e_p"));
        for (int k = 0; k < threads; k++) {
            final int id = k;
            Thread t = new Thread(() -> {
                byte[] b0 = body(i("size", 1024)); long step = 1_000_000_000L * threads / rate, next = 0;
                while (true) {
                    if (paused) next = 0;                            // A timetable per window.
                    if (!parked()) return;
                    if (next == 0) next = System.nanoTime() + step * id / threads;
                    long w = next - System.nanoTime();
                    if (w > 0) LockSupport.parkNanos(w);
                    try {
                        byte[] b = b0.clone();
                        ByteBuffer.wrap(b).putLong(next);
                        next += step;
                        p.send(new Message(topic, b));
                        ok.increment();
                    } catch (Throwable e) { if (stop) return; bad.increment(); err.println(e); }
                }
            });
            t.setDaemon(true); t.start();
        }
        windows(ok, bad, List.of(lat));
        p.shutdown(); c.shutdown();
    }

    /** Tries to send one message every 20 ms until it is accepted; prints how many milliseconds after the time in the file `since` that was. */
    static void probe() throws Exception {
        opt.putIfAbsent("timeout", "500");
        java.nio.file.Path since = Paths.get(s("since", "since"));
        DefaultMQProducer p = start(new DefaultMQProducer("bench_probe"));
        p.setRetryTimesWhenSendFailed(0);
        Files.write(Paths.get(s("ready", "ready")), new byte[0]);
        while (!Files.exists(since) || Files.size(since) == 0) Thread.sleep(2);
        long t0 = Long.parseLong(new String(Files.readAllBytes(since)).trim());
        Message m = new Message(s("topic", "BenchT16"), body(64));
        while (System.currentTimeMillis() - t0 < 180_000) {
            try {
                if (p.send(m).getSendStatus() != null) {
                    print(1, (System.currentTimeMillis() - t0) / 1000.0, 0, null, 0, 0);
                    break;
                }
            } catch (Throwable e) { Thread.sleep(20); }
        }
        p.shutdown();
    }

    public static void main(String[] a) throws Exception {
        System.setProperty("rocketmq.serialize.type", System.getProperty("rocketmq.serialize.type", "ROCKETMQ"));
        for (int k = 1; k < a.length; k++) { int e = a[k].indexOf('='); opt.put(a[k].substring(0, e), a[k].substring(e + 1)); }
        switch (a[0]) {
            case "send": send(); break;
            case "fill": fill(); break;
            case "push": push(); break;
            case "e2e": e2e(); break;
            case "probe": probe(); break;
            default: err.println("modes: send fill push e2e probe"); System.exit(2);
        }
        System.exit(0);
    }
}
