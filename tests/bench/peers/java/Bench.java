import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import java.util.concurrent.locks.LockSupport;

import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's own client under load. usage: java Bench MODE key=value...   (modes: send transaction push e2e probe fill)
 *
 * send, transaction and e2e have windows, see Load.java; the others end by themselves.
 */
public class Bench extends Load {
    static DefaultMQProducer start(DefaultMQProducer p) throws Exception {
        p.setNamesrvAddr(s("ns", ""));
        p.setInstanceName("p" + System.nanoTime());
        p.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        p.setSendMsgTimeout(i("timeout", 5000));
        p.start();
        return p;
    }

    static void check(SendResult r) {
        if (r.getSendStatus() != SendStatus.SEND_OK) throw new IllegalStateException(r.toString());
    }

    /** A message or a batch a call; `delay`: RocketMQ's level, 0 for none. */
    static void send() throws Exception {
        final String topic = s("topic", "BenchT16");
        final int batch = i("batch", 1), delay = i("delay", 0);
        final byte[] body = body(i("size", 1024));
        final DefaultMQProducer p = start(new DefaultMQProducer("bench_producer"));
        callers(i("threads", 64), () -> {
            if (batch > 1) {                                         // Making the messages counts, as on our side.
                List<Message> l = new ArrayList<>(batch);
                for (int x = 0; x < batch; x++) l.add(new Message(topic, body));
                check(p.send(l));
            } else {
                Message m = new Message(topic, body);
                if (delay > 0) m.setDelayTimeLevel(delay);
                check(p.send(m));
            }
            return batch;
        });
        p.shutdown();
    }

    /** Half message, a local transaction that does nothing, commit. Its client sends the commit one-way, and waits for no answer to it. */
    static void transaction() throws Exception {
        final String topic = s("topic", "BenchT16");
        final byte[] body = body(i("size", 1024));
        final TransactionMQProducer p = new TransactionMQProducer("bench_transactions");
        p.setTransactionListener(new TransactionListener() {
            public LocalTransactionState executeLocalTransaction(Message m, Object o) { return LocalTransactionState.COMMIT_MESSAGE; }
            public LocalTransactionState checkLocalTransaction(MessageExt m) { return LocalTransactionState.COMMIT_MESSAGE; }
        });
        start(p);
        callers(i("threads", 32), () -> {
            TransactionSendResult r = p.sendMessageInTransaction(new Message(topic, body), null);
            check(r);
            if (r.getLocalTransactionState() != LocalTransactionState.COMMIT_MESSAGE) throw new IllegalStateException(r.toString());
            return 1;
        });
        p.shutdown();
    }

    /**
     * Sends `limit` messages in batches of 64 from 4 threads, as fast as it goes. With `kinds`: the messages have a tag and four properties,
     * as those of tests/bench/loads/filters.py.
     */
    static void fill() throws Exception {
        final String topic = s("topic", "BenchT16");
        final byte[] body = body(i("size", 1024));
        final long limit = Long.parseLong(s("limit", "1000000"));
        final int kinds = i("kinds", 0);
        final AtomicLong next = new AtomicLong();
        final LongAdder ok = new LongAdder(), bad = new LongAdder();
        final DefaultMQProducer p = start(new DefaultMQProducer("bench_fill"));
        long t0 = System.nanoTime();
        Thread[] ts = new Thread[4];
        for (int k = 0; k < ts.length; k++) {
            ts[k] = new Thread(() -> {
                while (ok.sum() < limit && bad.sum() < 1000) try {
                    List<Message> l = new ArrayList<>(64);
                    for (int x = 0; x < 64; x++) l.add(kinds == 0 ? new Message(topic, body) : kind(topic, body, next.getAndIncrement(), kinds));
                    if (p.send(l).getSendStatus() == SendStatus.SEND_OK) ok.add(64); else bad.increment();
                } catch (Throwable e) { bad.increment(); if (bad.sum() < 4) err.println(e); LockSupport.parkNanos(1_000_000); }
            });
            ts[k].start();
        }
        for (Thread t : ts) t.join();
        print(ok.sum(), (System.nanoTime() - t0) / 1e9, bad.sum(), null, clientCpu(), serverCpu());
        p.shutdown();
    }

    static Message kind(String topic, byte[] body, long n, int kinds) {
        long kind = n % kinds;
        Message m = new Message(topic, "tag" + kind, body);
        m.putUserProperty("carrier", "UA");
        m.putUserProperty("delay", Long.toString(kind));
        m.putUserProperty("dest", String.format("D%02d", kind));
        m.putUserProperty("origin", new String[] {"JFK", "LGA", "EWR"}[(int) (n % 3)]);
        return m;
    }

    static DefaultMQPushConsumer pushConsumer(String group) throws Exception {
        DefaultMQPushConsumer c = new DefaultMQPushConsumer(group);
        c.setNamesrvAddr(s("ns", ""));
        c.setInstanceName("c" + System.nanoTime());
        c.setConsumeFromWhere(ConsumeFromWhere.valueOf(s("from", "CONSUME_FROM_FIRST_OFFSET")));
        c.setConsumeMessageBatchMaxSize(i("consumebatch", 1));
        c.setPullBatchSize(i("pullbatch", 32));
        if (opt.containsKey("sql")) c.subscribe(s("topic", "BenchT16"), MessageSelector.bySql(s("sql", "")));
        else c.subscribe(s("topic", "BenchT16"), s("tags", "*"));
        return c;
    }

    /**
     * Consumes what is stored (total messages); with a filter that keeps one of `share`, each that comes stands for so many. The result is the
     * best their side can show: the median half second of the run, start and end left out.
     */
    static void push() throws Exception {
        final LongAdder n = new LongAdder(), bytes = new LongAdder();
        final int share = i("share", 1);
        DefaultMQPushConsumer c = pushConsumer(s("group", "bench_push_" + System.currentTimeMillis()));
        c.registerMessageListener((MessageListenerConcurrently) (ms, ctx) -> {
            for (MessageExt m : ms) bytes.add(m.getBody().length);
            n.add((long) ms.size() * share);
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
        read(a);
        switch (a[0]) {
            case "send": send(); break;
            case "transaction": transaction(); break;
            case "fill": fill(); break;
            case "push": push(); break;
            case "e2e": e2e(); break;
            case "probe": probe(); break;
            default: err.println("modes: send fill push e2e probe"); System.exit(2);
        }
        System.exit(0);
    }
}
