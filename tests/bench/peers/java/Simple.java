import java.time.Duration;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CompletableFuture;

import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;

/**
 * RocketMQ's gRPC client at a proxy: threads share a simple consumer, receive `count` messages a call, and acknowledge each, which is what it
 * offers; the acknowledgements of a call are on their way together. usage: java Simple pop key=value...   It has windows, see Load.java.
 */
public class Simple extends Load {
    public static void main(String[] a) throws Exception {
        read(a);
        final ClientConfiguration configuration = ClientConfiguration.newBuilder()
            .setEndpoints(s("proxy", "")).enableSsl(false).setRequestTimeout(Duration.ofSeconds(60)).build();
        final SimpleConsumer consumer = ClientServiceProvider.loadService().newSimpleConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup(s("group", "bench_pop"))
            .setAwaitDuration(Duration.ofSeconds(1))
            .setSubscriptionExpressions(Collections.singletonMap(s("topic", "BenchT16"), FilterExpression.SUB_ALL))
            .build();
        final int count = i("count", 32);
        callers(i("threads", 16), () -> {
            List<MessageView> found = consumer.receive(count, Duration.ofSeconds(600));
            CompletableFuture<?>[] acks = new CompletableFuture<?>[found.size()];
            for (int k = 0; k < acks.length; k++) acks[k] = consumer.ackAsync(found.get(k));
            CompletableFuture.allOf(acks).join();
            return acks.length;
        });
        System.exit(0);
    }
}
