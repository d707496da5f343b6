package compat;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.function.Function;
import java.util.stream.Collectors;
import java.util.stream.LongStream;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.config.ConfigResource;

/**
 * Scenarios of share groups (KIP-932), whose consumers accept, release or reject records. A client without {@code
 * SubscriptionPattern} speaks an earlier version of the protocol, so it does not run them.
 */
final class ShareScenarios {
    private static final int RECORDS = 12;
    private static final int MANY = 400;
    private static final int DELIVERIES = 5;
    private static final int LOCK_MS = 2000;
    private static final double READ_SECONDS = 20;
    /** How long a scenario polls for records that must not arrive. */
    private static final double NOTHING_SECONDS = 1.5;

    private static final List<AcknowledgeType> TYPES =
            List.of(AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT);
    /** Constants by name, because the code is also compiled against clients before 4.0, which lack them. */
    private static final String GROUP = "GROUP";

    private static final String RENEW = "RENEW";

    private static final Duration POLL = Duration.ofMillis(200);

    private ShareScenarios() {}

    static void register(Map<String, Body> scenarios) {
        try {
            Class.forName("org.apache.kafka.clients.consumer.SubscriptionPattern");
        } catch (ClassNotFoundException earlier) {
            return;
        }
        scenarios.put("share.implicit", ShareScenarios::implicit);
        scenarios.put("share.acknowledged", ShareScenarios::acknowledged);
        scenarios.put("share.left-open", ShareScenarios::leftOpen);
        scenarios.put("share.released-too-often", ShareScenarios::releasedTooOften);
        scenarios.put("share.lock-lapses", ShareScenarios::lockLapses);
        scenarios.put("share.renewed", ShareScenarios::renewed);
        scenarios.put("share.closed", ShareScenarios::closed);
        scenarios.put("share.two-consumers", ShareScenarios::twoConsumers);
        scenarios.put("share.gateway-restart", run -> gatewayAway(run, "restart"));
        scenarios.put("share.gateway-kill", run -> gatewayAway(run, "kill"));
    }

    /** In implicit mode, the next poll or a commit accepts the records that were read. */
    private static void implicit(Run run) throws Exception {
        Group group = new Group(run);
        group.produce(0, RECORDS);
        try (KafkaShareConsumer<byte[], byte[]> consumer = group.consumer("implicit")) {
            Check.equal(new TreeSet<>(read(consumer, RECORDS, record -> null).keySet()), offsets(0, RECORDS), "read");
        }
        group.holdsNothing();
    }

    /** Accept one third of the records, release one third, and reject one third. The released ones are redelivered. */
    private static void acknowledged(Run run) throws Exception {
        Group group = new Group(run);
        group.produce(0, RECORDS);
        try (KafkaShareConsumer<byte[], byte[]> consumer = group.consumer("explicit")) {
            Map<Long, Integer> first = read(consumer, RECORDS, record -> TYPES.get((int) record.offset() % 3));
            Check.equal(new HashSet<>(first.values()), Set.of(1), "first deliveries");
            Map<Long, Integer> second = read(consumer, RECORDS / 3);
            Set<Long> released =
                    offsets(0, RECORDS).stream().filter(offset -> offset % 3 == 1).collect(Collectors.toSet());
            Check.equal(new HashSet<>(second.keySet()), released, "what was released");
            Check.equal(new HashSet<>(second.values()), Set.of(2), "second deliveries");
            committed(consumer);
        }
        group.holdsNothing();
    }

    /** A consumer may not poll before it has acknowledged every record. After the refusal it may acknowledge them. */
    private static void leftOpen(Run run) throws Exception {
        Group group = new Group(run);
        group.produce(0, 2);
        try (KafkaShareConsumer<byte[], byte[]> consumer = group.consumer("explicit")) {
            List<ConsumerRecord<byte[], byte[]>> records = new ArrayList<>();
            Check.eventually(() -> {
                consumer.poll(POLL).forEach(records::add);
                return !records.isEmpty();
            }, "records", READ_SECONDS);
            Check.fails(IllegalStateException.class, () -> consumer.poll(POLL), "a poll with records left open");
            records.forEach(record -> consumer.acknowledge(record, AcknowledgeType.ACCEPT));
            committed(consumer);
            Set<Long> rest = offsets(0, 2);
            records.forEach(record -> rest.remove(record.offset()));
            Check.equal(new TreeSet<>(read(consumer, rest.size()).keySet()), rest, "the others");
            committed(consumer);
        }
        group.holdsNothing();
    }

    /** A record that was released as often as the group allows is not delivered again. */
    private static void releasedTooOften(Run run) throws Exception {
        Group group = new Group(run);
        group.produce(0, 1);
        try (KafkaShareConsumer<byte[], byte[]> consumer = group.consumer("explicit")) {
            for (int delivery = 1; delivery <= DELIVERIES; delivery++) {
                Map<Long, Integer> given = read(consumer, 1, record -> AcknowledgeType.RELEASE);
                Check.equal(given, Map.of(0L, delivery), "delivery " + delivery);
            }
            group.produce(1, 1);
            Check.equal(read(consumer, 1), Map.of(1L, 1), "after the last delivery");
            committed(consumer);
        }
        group.holdsNothing();
    }

    /** If a consumer acknowledges nothing until its acquisition locks expire, another consumer receives its records. */
    private static void lockLapses(Run run) throws Exception {
        Group group = new Group(run);
        group.set("share.record.lock.duration.ms", String.valueOf(LOCK_MS));
        group.produce(0, RECORDS);
        try (KafkaShareConsumer<byte[], byte[]> silent = group.consumer("explicit")) {
            Set<Long> held = new TreeSet<>();
            Check.eventually(() -> {
                silent.poll(POLL).forEach(record -> held.add(record.offset()));
                return !held.isEmpty();
            }, "records to hold", READ_SECONDS);
            try (KafkaShareConsumer<byte[], byte[]> other = group.consumer("explicit")) {
                Map<Long, Integer> given = read(other, RECORDS);
                Check.equal(new TreeSet<>(given.keySet()), offsets(0, RECORDS), "all records");
                held.forEach(offset -> Check.equal(given.get(offset), 2, "delivery of " + offset));
                committed(other);
            }
        }
        group.holdsNothing();
    }

    /** An acquisition lock that is renewed does not expire. */
    private static void renewed(Run run) throws Exception {
        AcknowledgeType renew = AcknowledgeType.valueOf(RENEW);
        Group group = new Group(run);
        group.set("share.record.lock.duration.ms", String.valueOf(LOCK_MS));
        group.produce(0, 1);
        try (KafkaShareConsumer<byte[], byte[]> holder = group.consumer("explicit");
                KafkaShareConsumer<byte[], byte[]> other = group.consumer("explicit")) {
            int renewals = 0;
            long until = System.nanoTime() + 3 * LOCK_MS * 1_000_000L;
            Map<Long, Integer> elsewhere = new TreeMap<>();
            while (System.nanoTime() < until) {
                for (ConsumerRecord<byte[], byte[]> record : holder.poll(POLL)) {
                    holder.acknowledge(record, renew);
                    renewals++;
                }
                committed(holder);
                // The other consumer joins when the holder has acquired the record, so that none is left for it.
                if (renewals > 0) {
                    for (ConsumerRecord<byte[], byte[]> record : other.poll(POLL)) {
                        elsewhere.put(record.offset(), deliveries(record));
                        other.acknowledge(record, AcknowledgeType.RELEASE);
                    }
                }
            }
            Check.that(renewals > 2, renewals + " renewals");
            Check.equal(elsewhere, Map.of(), "given to the other");
            Check.equal(read(holder, 1), Map.of(0L, 1), "accepted in the end");
            committed(holder);
        }
        group.holdsNothing();
    }

    /** A consumer that closes releases the records that it has not acknowledged. */
    private static void closed(Run run) throws Exception {
        Group group = new Group(run);
        group.produce(0, RECORDS);
        Set<Long> accepted = new TreeSet<>();
        try (KafkaShareConsumer<byte[], byte[]> consumer = group.consumer("explicit")) {
            List<ConsumerRecord<byte[], byte[]>> records = new ArrayList<>();
            Check.eventually(() -> {
                if (records.isEmpty()) {
                    consumer.poll(POLL).forEach(records::add);
                }
                return !records.isEmpty();
            }, "records", READ_SECONDS);
            // Acknowledge only the first record. `close` sends this acknowledgement, too.
            consumer.acknowledge(records.get(0), AcknowledgeType.ACCEPT);
            accepted.add(records.get(0).offset());
        }
        try (KafkaShareConsumer<byte[], byte[]> next = group.consumer("explicit")) {
            Set<Long> rest = offsets(0, RECORDS);
            rest.removeAll(accepted);
            Check.equal(new TreeSet<>(read(next, rest.size()).keySet()), rest, "given back");
            committed(next);
        }
        group.holdsNothing();
    }

    /** Two consumers read one partition. Each record is delivered to one of them, and both receive some. */
    private static void twoConsumers(Run run) throws Exception {
        Group group = new Group(run);
        Map<Long, Integer> first = new TreeMap<>();
        Map<Long, Integer> second = new TreeMap<>();
        try (KafkaShareConsumer<byte[], byte[]> one = group.consumer("explicit");
                KafkaShareConsumer<byte[], byte[]> two = group.consumer("explicit")) {
            long[] produced = {0};
            Check.eventually(() -> {
                // Produce more records until both have received some, because one may join later than the other.
                if (produced[0] < MANY || first.isEmpty() || second.isEmpty()) {
                    group.produce(produced[0], 10);
                    produced[0] += 10;
                }
                accept(one, first);
                accept(two, second);
                return produced[0] >= MANY && !first.isEmpty() && !second.isEmpty()
                        && first.size() + second.size() >= produced[0];
            }, "all read by both", 2 * READ_SECONDS);
            Set<Long> all = new TreeSet<>(first.keySet());
            all.addAll(second.keySet());
            Check.equal(all, offsets(0, (int) produced[0]), "read");
            Check.equal(first.size() + second.size(), (int) produced[0], "deliveries");
            committed(one);
            committed(two);
        }
        group.holdsNothing();
    }

    /**
     * No record is lost while the gateway is down. Records whose acknowledgement was confirmed before are not delivered
     * again.
     */
    private static void gatewayAway(Run run, String how) throws Exception {
        Group group = new Group(run);
        group.produce(0, RECORDS);
        try (KafkaShareConsumer<byte[], byte[]> consumer = group.consumer("explicit")) {
            Map<Long, Integer> before = read(consumer, RECORDS);
            Check.equal(new TreeSet<>(before.keySet()), offsets(0, RECORDS), "read before");
            committed(consumer);
            run.gateway(how);
            group.produce(RECORDS, RECORDS);
            Map<Long, Integer> after = read(consumer, RECORDS);
            Check.equal(new TreeSet<>(after.keySet()), offsets(RECORDS, RECORDS), "read after");
            committed(consumer);
        }
        group.holdsNothing();
    }

    /** A new share group that reads a new topic of one partition from the beginning. */
    private static final class Group {
        private final Run run;
        private final String topic;
        private final String name;

        Group(Run run) {
            this.run = run;
            topic = run.topic(1);
            name = run.fresh("share");
            set("share.auto.offset.reset", "earliest");
        }

        void set(String setting, String value) {
            ConfigResource resource = new ConfigResource(ConfigResource.Type.valueOf(GROUP), name);
            AlterConfigOp operation = new AlterConfigOp(new ConfigEntry(setting, value), AlterConfigOp.OpType.SET);
            Clients.get(run.clients.admin().incrementalAlterConfigs(Map.of(resource, List.of(operation))).all());
        }

        /** Produce `count` records from offset `first` on. The value of each is its offset. */
        void produce(long first, int count) throws Exception {
            try (KafkaProducer<byte[], byte[]> producer = run.clients.producer(Map.of())) {
                for (long offset = first; offset < first + count; offset++) {
                    byte[] value = String.valueOf(offset).getBytes(StandardCharsets.UTF_8);
                    long given = Clients.get(producer.send(new ProducerRecord<>(topic, value))).offset();
                    Check.equal(given, offset, "offset");
                }
            }
        }

        KafkaShareConsumer<byte[], byte[]> consumer(String mode) {
            KafkaShareConsumer<byte[], byte[]> consumer = run.clients.shareConsumer(name, mode);
            consumer.subscribe(List.of(topic));
            return consumer;
        }

        /** Check that a new consumer of the group receives nothing, because every record is accepted or archived. */
        void holdsNothing() throws Exception {
            try (KafkaShareConsumer<byte[], byte[]> consumer = consumer("explicit")) {
                Map<Long, Integer> given = new HashMap<>();
                long until = System.nanoTime() + (long) (NOTHING_SECONDS * 1e9);
                while (System.nanoTime() < until) {
                    accept(consumer, given);
                }
                Check.equal(given, Map.of(), "given in the end");
            }
        }
    }

    private static Map<Long, Integer> read(KafkaShareConsumer<byte[], byte[]> consumer, int count) throws Exception {
        return read(consumer, count, record -> AcknowledgeType.ACCEPT);
    }

    /**
     * Read `count` records, and return their delivery counts by offset. `judged` returns a record's acknowledgement, or
     * null for none. The acknowledgements must be confirmed.
     */
    private static Map<Long, Integer> read(
            KafkaShareConsumer<byte[], byte[]> consumer,
            int count,
            Function<ConsumerRecord<byte[], byte[]>, AcknowledgeType> judged)
            throws Exception {
        Map<Long, Integer> given = new TreeMap<>();
        long deadline = System.nanoTime() + (long) (READ_SECONDS * 1e9);
        while (given.size() < count) {
            Check.that(System.nanoTime() < deadline, given.keySet() + " are all there is of " + count + " records");
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(POLL)) {
                String value = new String(record.value(), StandardCharsets.UTF_8);
                Check.equal(value, String.valueOf(record.offset()), "value");
                given.put(record.offset(), deliveries(record));
                AcknowledgeType becomes = judged.apply(record);
                if (becomes != null) {
                    consumer.acknowledge(record, becomes);
                }
            }
        }
        committed(consumer);
        Check.equal(given.size(), count, "records");
        return given;
    }

    private static void accept(KafkaShareConsumer<byte[], byte[]> consumer, Map<Long, Integer> given) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(POLL)) {
            Check.that(given.put(record.offset(), deliveries(record)) == null, record.offset() + " came twice");
            consumer.acknowledge(record, AcknowledgeType.ACCEPT);
        }
    }

    /**
     * Return how often the record has been delivered to any consumer. This needs reflection, because the code is also
     * compiled against clients before 4.0, which lack the method.
     */
    private static int deliveries(ConsumerRecord<byte[], byte[]> record) {
        try {
            Optional<?> count = (Optional<?>) ConsumerRecord.class.getMethod("deliveryCount").invoke(record);
            return ((Number) count.orElseThrow()).intValue();
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    /** Commit, and check that all acknowledgements so far are confirmed. */
    private static void committed(KafkaShareConsumer<byte[], byte[]> consumer) {
        List<String> refused = consumer.commitSync().values().stream()
                .flatMap(error -> error.stream())
                .map(Object::toString)
                .toList();
        Check.equal(refused, List.of(), "refused acknowledgements");
    }

    private static Set<Long> offsets(long first, int count) {
        return LongStream.range(first, first + count).boxed().collect(Collectors.toCollection(TreeSet::new));
    }
}
