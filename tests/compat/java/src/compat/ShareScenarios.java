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
 * Share groups (KIP-932) of a consumer that says of each record what became of it: accepted, released or rejected. A
 * client that has no {@code SubscriptionPattern} speaks an earlier protocol, and is not asked.
 */
final class ShareScenarios {
    private static final int RECORDS = 12;
    private static final int MANY = 400;
    private static final int DELIVERIES = 5;
    private static final int LOCK_MS = 2000;
    private static final double READ_SECONDS = 20;
    /** How long a reader that must be given nothing is watched. */
    private static final double NOTHING_SECONDS = 1.5;

    private static final List<AcknowledgeType> TYPES =
            List.of(AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT);
    /** By their names: clients before 4.0 lack them, and this is compiled for both. */
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

    /** What was read is accepted by the next poll, or by a commit. */
    private static void implicit(Run run) throws Exception {
        Group group = new Group(run);
        group.produce(0, RECORDS);
        try (KafkaShareConsumer<byte[], byte[]> consumer = group.consumer("implicit")) {
            Check.equal(new TreeSet<>(read(consumer, RECORDS, record -> null).keySet()), offsets(0, RECORDS), "read");
        }
        group.holdsNothing();
    }

    /** A third of the records each is accepted, released and rejected; what was released comes once more. */
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

    /** Who has not said of every record what became of it may not poll, and may say so then. */
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

    /** A record that was released as often as may be is given to nobody any more. */
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

    /** A consumer that says nothing for the time of its lock loses its records to another. */
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

    /** A lock that is renewed does not lapse. */
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
                // It joins once there is nothing left for it.
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

    /** Who closes gives back what it was given and has not said anything of. */
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
            // Only the first, which its close tells as well.
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

    /** Two consumers of one partition: each record is given to one of them, and both are given some. */
    private static void twoConsumers(Run run) throws Exception {
        Group group = new Group(run);
        Map<Long, Integer> first = new TreeMap<>();
        Map<Long, Integer> second = new TreeMap<>();
        try (KafkaShareConsumer<byte[], byte[]> one = group.consumer("explicit");
                KafkaShareConsumer<byte[], byte[]> two = group.consumer("explicit")) {
            long[] produced = {0};
            Check.eventually(() -> {
                // As long as one of them has joined alone, there is something for the other later.
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

    /** Nothing is lost while the gateway is away, and what was acknowledged and confirmed before comes no more. */
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

    /** A fresh share group over a fresh topic of one partition, that reads it from the beginning. */
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

        /** Offsets and values from `first` on. */
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

        /** Another consumer of the group is given nothing: all there is was accepted or is archived. */
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

    /** Offset to delivery count of `count` records; what becomes of each (null: nothing is said) is confirmed. */
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

    /** How often it has been given to anyone. Clients before 4.0 do not tell it, and this is compiled for both. */
    private static int deliveries(ConsumerRecord<byte[], byte[]> record) {
        try {
            Optional<?> count = (Optional<?>) ConsumerRecord.class.getMethod("deliveryCount").invoke(record);
            return ((Number) count.orElseThrow()).intValue();
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    /** All acknowledgements so far are confirmed. */
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
