import java.util.*;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.*;
import org.apache.rocketmq.common.message.MessageQueue;

/** Prints what RocketMQ's allocation classes give to each member, as JSON: an array of cases. */
public class Vectors {
    static StringBuilder out = new StringBuilder("[\n");
    static boolean first = true;

    static String quote(String text) { return "\"" + text + "\""; }

    static void add(String strategy, String settings, AllocateMessageQueueStrategy s, List<MessageQueue> queues, List<String> members) {
        if (!first) out.append(",\n");
        first = false;
        out.append("{\"strategy\":").append(quote(strategy)).append(",\"settings\":").append(settings).append(",\"queues\":[");
        for (int i = 0; i < queues.size(); i++) {
            MessageQueue q = queues.get(i);
            out.append(i > 0 ? "," : "").append("[").append(quote(q.getTopic())).append(",").append(quote(q.getBrokerName())).append(",").append(q.getQueueId()).append("]");
        }
        out.append("],\"members\":[");
        for (int i = 0; i < members.size(); i++) out.append(i > 0 ? "," : "").append(quote(members.get(i)));
        out.append("],\"shares\":{");
        for (int i = 0; i < members.size(); i++) {
            out.append(i > 0 ? "," : "").append(quote(members.get(i))).append(":[");
            List<MessageQueue> got = s.allocate("group", members.get(i), queues, members);
            for (int j = 0; j < got.size(); j++) out.append(j > 0 ? "," : "").append(queues.indexOf(got.get(j)));
            out.append("]");
        }
        out.append("}}");
    }

    static List<MessageQueue> queues(String topic, String[] brokers, int count) {
        List<MessageQueue> all = new ArrayList<>();
        for (String b : brokers) for (int i = 0; i < count; i++) all.add(new MessageQueue(topic, b, i));
        Collections.sort(all);
        return all;
    }

    static List<String> members(int count, boolean rooms) {
        List<String> all = new ArrayList<>();
        for (int i = 0; i < count; i++) all.add((rooms ? "room" + (i % 3) + "-" : "") + "192.0.2." + (7 * i % 250) + "@" + (4000 + 13 * i));
        Collections.sort(all);
        return all;
    }

    static AllocateMachineRoomNearby.MachineRoomResolver resolver = new AllocateMachineRoomNearby.MachineRoomResolver() {
        public String brokerDeployIn(MessageQueue q) { return q.getBrokerName().split("@")[0]; }
        public String consumerDeployIn(String client) { return client.split("-")[0]; }
    };

    public static void main(String[] arguments) {
        int[] memberCounts = {1, 2, 3, 8, 17};
        int[] queueCounts = {1, 3, 8};
        for (int m : memberCounts) for (int q : queueCounts) {
            List<MessageQueue> plain = queues("orders", new String[] {"broker-a", "broker-b", "broker-c"}, q);
            List<MessageQueue> rooms = queues("orders", new String[] {"room0@a", "room1@b", "room4@c", "plain"}, q);
            List<String> names = members(m, false), roomNames = members(m, true);
            add("average", "{}", new AllocateMessageQueueAveragely(), plain, names);
            add("circle", "{}", new AllocateMessageQueueAveragelyByCircle(), plain, names);
            AllocateMessageQueueByMachineRoom byRoom = new AllocateMessageQueueByMachineRoom();
            byRoom.setConsumeridcs(new HashSet<>(Arrays.asList("room0", "room4")));
            add("machine-room", "{\"rooms\":[\"room0\",\"room4\"]}", byRoom, rooms, names);
            rooms.removeIf(one -> one.getBrokerName().equals("plain"));
            add("machine-room-near", "{\"inner\":\"average\"}", new AllocateMachineRoomNearby(new AllocateMessageQueueAveragely(), resolver), rooms, roomNames);
            add("machine-room-near", "{\"inner\":\"circle\"}", new AllocateMachineRoomNearby(new AllocateMessageQueueAveragelyByCircle(), resolver), rooms, roomNames);
            add("consistent-hash", "{\"virtual_nodes\":10}", new AllocateMessageQueueConsistentHash(), plain, names);
            add("consistent-hash", "{\"virtual_nodes\":3}", new AllocateMessageQueueConsistentHash(3), plain, names);
            AllocateMessageQueueByConfig config = new AllocateMessageQueueByConfig();
            config.setMessageQueueList(plain.subList(0, plain.size() / 2));
            add("configuration", "{\"count\":" + plain.size() / 2 + "}", config, plain, names);
        }
        System.out.println(out.append("\n]"));
    }
}
