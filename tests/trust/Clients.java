import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * All Java clients of a run in one process, so that a run pays for one virtual machine.
 *
 * <p>Standard input has one command per line, standard output one event per line; fields are separated by tabs, and the
 * second one is the id that the caller gave to the client. {@code tests/trust/java.py} is the caller. Times are seconds
 * of {@code System.nanoTime}, which on Linux is the clock of Python's {@code time.monotonic}.
 */
public final class Clients {
    private static final Duration POLL = Duration.ofMillis(100);
    private static final Duration CALL = Duration.ofSeconds(10);
    private static final Duration LEAVE = Duration.ofSeconds(30);
    private static final int COMMIT_EVERY = 100;

    private static final Map<String, Client> CLIENTS = new ConcurrentHashMap<>();

    private Clients() {}

    public static void main(String[] arguments) throws Exception {
        String bootstrap = arguments[0];
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            String[] words = line.split("\t", -1);
            switch (words[0]) {
                case "producer" -> start(new Sender(words, bootstrap));
                case "send" -> ((Sender) CLIENTS.get(words[1])).put(words);
                case "member" -> start(new Member(words, bootstrap));
                case "sharer" -> start(new Sharer(words, bootstrap));
                case "transfer" -> start(new Transfer(words, bootstrap));
                case "stop" -> CLIENTS.get(words[1]).stopping = true;
                default -> throw new IllegalArgumentException(line);
            }
        }
        System.exit(0);
    }

    private static void start(Client client) {
        CLIENTS.put(client.id, client);
        client.start();
    }

    private static String now() {
        return Double.toString(System.nanoTime() / 1e9);
    }

    private static synchronized void say(Object... words) {
        List<String> texts = new ArrayList<>();
        for (Object word : words) {
            texts.add(String.valueOf(word).replace('\t', ' ').replace('\n', ' '));
        }
        System.out.println(String.join("\t", texts));
    }

    /** A client on a thread of its own. Its last event is {@code ended}, with the error that ended it, if any. */
    private abstract static class Client extends Thread {
        final String id;
        volatile boolean stopping;

        Client(String id) {
            super(id);
            this.id = id;
            setDaemon(true);
        }

        abstract void live() throws Exception;

        @Override
        public void run() {
            String error = "";
            try {
                live();
            } catch (Exception raised) {
                error = raised.toString();
            }
            CLIENTS.remove(id);
            say("ended", id, error);
        }
    }

    private static Map<String, Object> common(String bootstrap, String clientId) {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("client.id", clientId);
        settings.put("reconnect.backoff.ms", 50);
        settings.put("reconnect.backoff.max.ms", 500);
        settings.put("request.timeout.ms", 6_000);
        settings.put("default.api.timeout.ms", 10_000);
        return settings;
    }

    private static KafkaProducer<byte[], byte[]> producer(Map<String, Object> settings) {
        settings.remove("default.api.timeout.ms");
        return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

    private static Map<String, Object> consumer(String bootstrap, String clientId, String group, String protocol) {
        Map<String, Object> settings = common(bootstrap, clientId);
        settings.put("group.id", group);
        settings.put("enable.auto.commit", false);
        settings.put("auto.offset.reset", "earliest");
        if (protocol.equals("consumer")) {
            settings.put("group.protocol", "consumer");
            return settings;
        }
        settings.put("session.timeout.ms", 45_000);
        settings.put("heartbeat.interval.ms", 500);
        String assignor = protocol.equals("eager") ? "RangeAssignor" : "CooperativeStickyAssignor";
        settings.put("partition.assignment.strategy", "org.apache.kafka.clients.consumer." + assignor);
        return settings;
    }

    private static KafkaConsumer<byte[], byte[]> consumer(Map<String, Object> settings) {
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private static String text(byte[] bytes) {
        return new String(bytes, StandardCharsets.UTF_8);
    }

    /** A producer. Its command: producer, id, client id, idempotent, linger.ms, compression.type. */
    private static final class Sender extends Client {
        private final KafkaProducer<byte[], byte[]> producer;
        /** Records wait here, because KafkaProducer.send blocks while no node answers. */
        private final BlockingQueue<String[]> records = new ArrayBlockingQueue<>(10_000);

        Sender(String[] words, String bootstrap) {
            super(words[1]);
            Map<String, Object> settings = common(bootstrap, words[2]);
            settings.put("enable.idempotence", Boolean.valueOf(words[3]));
            settings.put("acks", "all");
            settings.put("linger.ms", Integer.valueOf(words[4]));
            settings.put("compression.type", words[5]);
            settings.put("delivery.timeout.ms", 900_000);
            producer = producer(settings);
        }

        /** Queue a record. Its command: send, id, topic, partition, key or nothing, value. */
        void put(String[] words) throws InterruptedException {
            records.put(words);
        }

        private void send(String[] words) {
            byte[] key = words[4].isEmpty() ? null : words[4].getBytes(StandardCharsets.UTF_8);
            byte[] value = words[5].getBytes(StandardCharsets.UTF_8);
            // KafkaProducer always calls back, even if the buffer is full or the producer has failed for good.
            producer.send(new ProducerRecord<>(words[2], Integer.valueOf(words[3]), key, value), (found, error) -> {
                long offset = error == null && found.hasOffset() ? found.offset() : -1;
                say("sent", id, words[5], error == null ? "ok" : "unknown", offset);
            });
        }

        @Override
        void live() throws Exception {
            while (!stopping || !records.isEmpty()) {
                String[] words = records.poll(POLL.toMillis(), TimeUnit.MILLISECONDS);
                if (words != null) {
                    send(words);
                }
            }
            producer.close();
        }
    }

    /**
     * A member of a group. Its command: member, id, client id, group, topic, protocol, isolation.level,
     * group.instance.id or nothing, and the milliseconds for which a revocation waits before it commits.
     */
    private static final class Member extends Client implements ConsumerRebalanceListener {
        private final String topic;
        private final long releaseMs;
        private final KafkaConsumer<byte[], byte[]> consumer;
        private final Map<Integer, Long> positions = new HashMap<>();
        private final Set<Integer> owned = new HashSet<>();
        private boolean closing;

        Member(String[] words, String bootstrap) {
            super(words[1]);
            topic = words[4];
            releaseMs = Long.parseLong(words[8]);
            Map<String, Object> settings = consumer(bootstrap, words[2], words[3], words[5]);
            settings.put("isolation.level", words[6]);
            if (!words[7].isEmpty()) {
                settings.put("group.instance.id", words[7]);
            }
            consumer = consumer(settings);
        }

        @Override
        void live() throws Exception {
            try {
                consumer.subscribe(List.of(topic), this);
                int processed = 0;
                while (!stopping) {
                    for (ConsumerRecord<byte[], byte[]> record : consumer.poll(POLL)) {
                        say("took", id, record.partition(), record.offset(), text(record.value()), now());
                        positions.put(record.partition(), record.offset() + 1);
                        processed++;
                    }
                    if (processed >= COMMIT_EVERY) {
                        commit(positions.keySet());
                        processed = 0;
                    }
                }
                commit(positions.keySet());
            } finally {
                // A static member keeps its partitions when it closes. So this client itself says that it has stopped.
                closing = true;
                owned.forEach(partition -> say("revoked", id, partition, now()));
                consumer.close(org.apache.kafka.clients.consumer.CloseOptions.timeout(LEAVE));
            }
        }

        private void commit(Collection<Integer> partitions) {
            Map<TopicPartition, OffsetAndMetadata> wanted = new HashMap<>();
            for (int partition : partitions) {
                Long offset = positions.get(partition);
                if (offset != null) {
                    wanted.put(new TopicPartition(topic, partition), new OffsetAndMetadata(offset));
                }
            }
            if (wanted.isEmpty()) {
                return;
            }
            String invoked = now();
            String outcome = "ok";
            try {
                consumer.commitSync(wanted, CALL);
            } catch (KafkaException refusedOrUnanswered) {
                outcome = "unknown";
            }
            for (Map.Entry<TopicPartition, OffsetAndMetadata> each : wanted.entrySet()) {
                say("committed", id, each.getKey().partition(), each.getValue().offset(), invoked, now(), outcome);
            }
        }

        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            for (TopicPartition each : partitions) {
                positions.remove(each.partition());
                owned.add(each.partition());
                say("assigned", id, each.partition(), now());
            }
        }

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            if (closing) {
                return;
            }
            try {
                Thread.sleep(releaseMs);
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
            commit(partitions.stream().map(TopicPartition::partition).toList());
            forget(partitions, "revoked");
        }

        @Override
        public void onPartitionsLost(Collection<TopicPartition> partitions) {
            if (!closing) {
                forget(partitions, "lost");
            }
        }

        private void forget(Collection<TopicPartition> partitions, String change) {
            for (TopicPartition each : partitions) {
                positions.remove(each.partition());
                owned.remove(each.partition());
                say(change, id, each.partition(), now());
            }
        }
    }

    /**
     * A member of a share group (KIP-932). Its command: sharer, id, client id, group, topic, seed.
     *
     * <p>The member accepts most records. It always rejects some values, and always releases others until they have
     * been delivered as often as the group allows. It also releases records at random.
     */
    private static final class Sharer extends Client {
        private final String topic;
        private final Random chance;
        private final KafkaShareConsumer<byte[], byte[]> consumer;

        Sharer(String[] words, String bootstrap) {
            super(words[1]);
            topic = words[4];
            chance = new Random(Long.parseLong(words[5]));
            Map<String, Object> settings = common(bootstrap, words[2]);
            settings.put("group.id", words[3]);
            settings.put("share.acknowledgement.mode", "explicit");
            settings.put("max.poll.records", COMMIT_EVERY);
            consumer = new KafkaShareConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        }

        @Override
        void live() {
            try {
                consumer.subscribe(List.of(topic));
                while (!stopping) {
                    settle(consumer.poll(POLL));
                }
            } finally {
                consumer.close(LEAVE);
            }
        }

        private void settle(ConsumerRecords<byte[], byte[]> records) {
            Map<ConsumerRecord<byte[], byte[]>, AcknowledgeType> settled = new HashMap<>();
            for (ConsumerRecord<byte[], byte[]> record : records) {
                say("delivered", id, record.partition(), record.offset(), text(record.value()), count(record), now());
                AcknowledgeType type = type(Long.parseLong(text(record.value())));
                consumer.acknowledge(record, type);
                settled.put(record, type);
            }
            if (settled.isEmpty()) {
                return;
            }
            String invoked = now();
            Map<Integer, String> outcomes = new HashMap<>();
            try {
                consumer.commitSync(CALL).forEach((part, error) -> {
                    // The result may also name a partition whose acknowledgement was sent with the previous poll.
                    outcomes.merge(part.partition(), error.isEmpty() ? "ok" : "unknown", (one, other) -> "unknown");
                });
            } catch (KafkaException unanswered) {
                outcomes.clear();
            }
            settled.forEach((record, type) -> say(
                    "settled", id, record.partition(), record.offset(), count(record), type.toString(), invoked, now(),
                    outcomes.getOrDefault(record.partition(), "unknown")));
        }

        private AcknowledgeType type(long value) {
            if (value % 40 == 13) {
                return AcknowledgeType.REJECT;
            }
            return value % 40 == 7 || chance.nextInt(30) == 0 ? AcknowledgeType.RELEASE : AcknowledgeType.ACCEPT;
        }

        private static int count(ConsumerRecord<byte[], byte[]> record) {
            return record.deliveryCount().orElseThrow();
        }
    }

    /**
     * A client that copies records in transactions. Its command: transfer, id, group, source, target, transactional.id,
     * partitions of the target, seed, share of aborts.
     *
     * <p>An error or an abort ends the client, because its position has then moved past records that are not committed.
     * The caller starts the next client.
     */
    private static final class Transfer extends Client {
        private final String source;
        private final String target;
        private final int partitions;
        private final double aborted;
        private final Random chance;
        private final KafkaProducer<byte[], byte[]> producer;
        private final KafkaConsumer<byte[], byte[]> consumer;

        Transfer(String[] words, String bootstrap) {
            super(words[1]);
            source = words[3];
            target = words[4];
            partitions = Integer.parseInt(words[6]);
            chance = new Random(Long.parseLong(words[7]));
            aborted = Double.parseDouble(words[8]);
            Map<String, Object> sending = common(bootstrap, words[5]);
            sending.put("transactional.id", words[5]);
            sending.put("transaction.timeout.ms", 30_000);
            sending.put("max.block.ms", 30_000);
            producer = producer(sending);
            Map<String, Object> reading = consumer(bootstrap, words[5], words[2], "cooperative");
            reading.put("isolation.level", "read_committed");
            reading.put("session.timeout.ms", 15_000);
            reading.put("max.poll.records", 50);
            consumer = consumer(reading);
        }

        @Override
        void live() {
            try (consumer) {
                producer.initTransactions();
                consumer.subscribe(List.of(source));
                while (!stopping) {
                    ConsumerRecords<byte[], byte[]> records = consumer.poll(POLL);
                    if (!records.isEmpty() && !transfer(records)) {
                        return;
                    }
                }
            } finally {
                producer.close(CALL);
            }
        }

        private boolean transfer(ConsumerRecords<byte[], byte[]> records) {
            producer.beginTransaction();
            Map<TopicPartition, OffsetAndMetadata> ends = new HashMap<>();
            for (ConsumerRecord<byte[], byte[]> record : records) {
                int partition = Integer.parseInt(text(record.value())) % partitions;
                producer.send(new ProducerRecord<>(target, partition, null, record.value()));
                ends.put(
                        new TopicPartition(record.topic(), record.partition()),
                        new OffsetAndMetadata(record.offset() + 1));
            }
            producer.sendOffsetsToTransaction(ends, consumer.groupMetadata());
            if (chance.nextDouble() < aborted) {
                producer.abortTransaction();
                return false;
            }
            while (true) {
                try {
                    producer.commitTransaction();
                    say("transferred", id, records.count());
                    return true;
                } catch (TimeoutException again) {
                    // Java allows only the same call again. After a transaction timeout that call throws another error.
                    continue;
                }
            }
        }
    }
}
