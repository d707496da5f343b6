package compat;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.apache.kafka.clients.admin.AbortTransactionSpec;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListTransactionsOptions;
import org.apache.kafka.clients.admin.ProducerState;
import org.apache.kafka.clients.admin.TransactionDescription;
import org.apache.kafka.clients.admin.TransactionListing;
import org.apache.kafka.clients.admin.TransactionState;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InvalidProducerEpochException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TransactionalIdNotFoundException;

/** Scenarios of transactions: what read_committed consumers receive, and exactly-once consume-transform-produce. */
final class TransactionScenarios {
    /** How long a scenario polls for records that must not arrive. */
    private static final double NOTHING_SECONDS = 1.5;

    private static final double READ_SECONDS = 45;
    private static final double JOIN_SECONDS = 30;
    private static final int TIMEOUT_MS = 2000;

    /** Limit for the abort of a timed-out transaction. Kafka looks for such transactions only every ten seconds. */
    private static final double ABORTED_SECONDS = 20;

    private static final int STEP = 5;
    private static final int LIVES = 6;
    private static final int CALL_MS = 15_000;
    private static final Duration CLOSE = Duration.ofSeconds(2);

    private TransactionScenarios() {}

    static void register(Map<String, Body> scenarios) {
        scenarios.put("transactions.commit-abort", TransactionScenarios::commitAbort);
        scenarios.put("transactions.open", TransactionScenarios::open);
        scenarios.put("transactions.fencing", TransactionScenarios::fencing);
        scenarios.put("transactions.consume-transform-produce", TransactionScenarios::consumeTransformProduce);
        scenarios.put("transactions.gateway-kill", TransactionScenarios::gatewayKill);
        scenarios.put("transactions.timeout", TransactionScenarios::timeout);
        scenarios.put("admin.transactions", TransactionScenarios::admin);
    }

    private static void commitAbort(Run run) throws Exception {
        String topic = run.topic(2);
        try (KafkaProducer<byte[], byte[]> producer = transactional(run, run.fresh("x"))) {
            for (String name : List.of("committed", "aborted", "committed-again")) {
                producer.beginTransaction();
                send(producer, steps(topic, name, 2));
                if (name.equals("aborted")) {
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                }
            }
        }
        // The control record that ends a transaction takes an offset of its own, after each five records.
        List<String> committed = Stream.concat(expected("committed", 0), expected("committed-again", 2 * (STEP + 1)))
                .toList();
        List<String> whole = Stream.of(
                        expected("committed", 0),
                        expected("aborted", STEP + 1),
                        expected("committed-again", 2 * (STEP + 1)))
                .flatMap(records -> records)
                .toList();
        long end = 3 * (STEP + 1);
        for (int partition = 0; partition < 2; partition++) {
            for (String isolation : List.of("read_committed", "read_uncommitted")) {
                List<String> due = isolation.equals("read_committed") ? committed : whole;
                String where = isolation + ", partition " + partition;
                try (KafkaConsumer<byte[], byte[]> reader = reader(run, topic, partition, isolation)) {
                    Check.equal(read(reader, due.size(), READ_SECONDS), due, where);
                    Check.equal(read(reader, 1, NOTHING_SECONDS), List.of(), where + ", behind all");
                    Check.eventually(() -> end(reader) == end, "the log ends at " + end);
                }
            }
        }
    }

    private static void open(Run run) throws Exception {
        String topic = run.topic(1);
        try (KafkaProducer<byte[], byte[]> other = run.clients.producer(Map.of());
                KafkaProducer<byte[], byte[]> producer = transactional(run, run.fresh("x"));
                KafkaConsumer<byte[], byte[]> committed = reader(run, topic, 0, "read_committed");
                KafkaConsumer<byte[], byte[]> uncommitted = reader(run, topic, 0, "read_uncommitted")) {
            send(other, List.of(record(topic, 0, "before")));
            producer.beginTransaction();
            send(producer, steps(topic, "open", 1));
            send(other, List.of(record(topic, 0, "behind"), record(topic, 0, "behind")));
            List<String> rest = Stream.concat(
                            expected("open", 1), Stream.of((STEP + 1) + " behind", (STEP + 2) + " behind"))
                    .toList();
            List<String> all = Stream.concat(Stream.of("0 before"), rest.stream()).toList();
            Check.equal(read(uncommitted, all.size(), READ_SECONDS), all, "read_uncommitted");
            Check.equal(read(committed, 1, READ_SECONDS), List.of("0 before"), "read_committed");
            Check.equal(read(committed, 1, NOTHING_SECONDS), List.of(), "read_committed, while the transaction is open");
            Check.equal(end(uncommitted), STEP + 3L, "the high watermark");
            Check.equal(end(committed), 1L, "the last stable offset");
            producer.commitTransaction();
            Check.equal(read(committed, rest.size(), READ_SECONDS), rest, "read_committed, once it has ended");
            Check.eventually(() -> end(committed) == STEP + 4, "the last stable offset goes on");
        }
    }

    private static void fencing(Run run) throws Exception {
        String topic = run.topic(1);
        String id = run.fresh("x");
        KafkaProducer<byte[], byte[]> first = transactional(run, id);
        KafkaProducer<byte[], byte[]> second = null;
        KafkaProducer<byte[], byte[]> third = null;
        try {
            first.beginTransaction();
            send(first, List.of(record(topic, 0, "fenced")));
            second = transactional(run, id);
            fenced(first::commitTransaction);
            inOne(second, topic, "second");
            third = transactional(run, id);
            // The second producer has no open transaction. So only the first request of its next transaction is fenced.
            KafkaProducer<byte[], byte[]> followed = second;
            fenced(() -> inOne(followed, topic, "fenced, too"));
            inOne(third, topic, "third");
        } finally {
            Stream.of(first, second, third).filter(producer -> producer != null).forEach(p -> p.close(CLOSE));
        }
        try (KafkaConsumer<byte[], byte[]> reader = reader(run, topic, 0, "read_committed")) {
            // Offset 1 is the control record of the first transaction, which was aborted.
            Check.equal(read(reader, 2, READ_SECONDS), List.of("2 second", "4 third"), "read_committed");
            Check.equal(read(reader, 1, NOTHING_SECONDS), List.of(), "read_committed, behind all");
        }
    }

    private static void consumeTransformProduce(Run run) throws Exception {
        String source = run.topic(2, "source");
        String target = run.topic(2, "target");
        String group = run.fresh("g");
        List<String> values = fill(run, source);
        try (KafkaProducer<byte[], byte[]> producer = transactional(run, run.fresh("x"))) {
            try (KafkaConsumer<byte[], byte[]> reader = member(run, group, source)) {
                List<ConsumerRecord<byte[], byte[]>> found = poll(reader, 2 * STEP, JOIN_SECONDS);
                Check.equal(found.size(), 2 * STEP, "records read");
                transform(producer, reader, found, target, () -> {});
                producer.abortTransaction();
            }
            Check.equal(committed(run, group, source), Arrays.asList(null, null), "after an aborted transaction");
            try (KafkaConsumer<byte[], byte[]> reader = member(run, group, source)) {
                for (int done = 0; done < values.size(); done += STEP) {
                    List<ConsumerRecord<byte[], byte[]>> found = poll(reader, STEP, JOIN_SECONDS);
                    Check.equal(found.size(), STEP, "records read");
                    transform(producer, reader, found, target, () -> {});
                    producer.commitTransaction();
                }
            }
        }
        Long half = values.size() / 2L;
        Check.eventually(() -> committed(run, group, source).equals(List.of(half, half)), "all is committed");
        exactlyOnce(run, group, source, target, values);
    }

    /**
     * Kill the gateway between a transaction's records and its offsets. After an error the application starts again
     * with the same transactional id and from the committed offsets, as Kafka's documentation says.
     */
    private static void gatewayKill(Run run) throws Exception {
        String source = run.topic(2, "source");
        String target = run.topic(2, "target");
        String group = run.fresh("g");
        String id = run.fresh("x");
        List<String> values = fill(run, source);
        Long half = values.size() / 2L;
        boolean[] killed = {false};
        int done = 0;
        for (int life = 1; done < values.size(); life++) {
            Check.that(life <= LIVES, done + " of " + values.size() + " are known to be committed: " + run.detail);
            KafkaProducer<byte[], byte[]> producer = transactional(run, id);
            Moves moves = new Moves();
            KafkaConsumer<byte[], byte[]> reader = member(run, group, source, moves);
            try {
                while (done < values.size()) {
                    List<ConsumerRecord<byte[], byte[]>> found = poll(reader, STEP, JOIN_SECONDS, moves);
                    if (found.isEmpty()) {
                        // Either the transaction of unknown outcome was committed, or records are only late.
                        if (committed(run, group, source).equals(List.of(half, half))) {
                            done = values.size();
                        }
                        continue;
                    }
                    boolean due = !killed[0] && done >= 2 * STEP;
                    transform(producer, reader, found, target, () -> {
                        if (due) {
                            killed[0] = true;
                            run.gateway("kill");
                        }
                    });
                    producer.commitTransaction();
                    done += found.size();
                }
            } catch (RuntimeException | ExecutionException | AssertionError error) {
                System.err.println("life " + life + " ended with " + error);
                run.detail += "life " + life + " ended with " + error + "; ";
            } finally {
                producer.close(CLOSE);
                reader.close();
            }
        }
        Check.that(killed[0], "it was all read before the gateway was killed");
        exactlyOnce(run, group, source, target, values);
    }

    private static void timeout(Run run) throws Exception {
        String topic = run.topic(1);
        String id = run.fresh("x");
        KafkaProducer<byte[], byte[]> producer = transactional(run, id, TIMEOUT_MS);
        try (KafkaProducer<byte[], byte[]> other = run.clients.producer(Map.of());
                KafkaConsumer<byte[], byte[]> reader = reader(run, topic, 0, "read_committed")) {
            producer.beginTransaction();
            send(producer, List.of(record(topic, 0, "left open")));
            long started = System.nanoTime();
            send(other, List.of(record(topic, 0, "behind")));
            Check.equal(read(reader, 1, TIMEOUT_MS / 2000.0), List.of(), "read_committed, before the time is over");
            Check.equal(read(reader, 1, ABORTED_SECONDS), List.of("1 behind"), "read_committed, once it is over");
            run.detail = String.format("aborted after %.1f s", (System.nanoTime() - started) / 1e9);
            boolean refused = false;
            try {
                producer.commitTransaction();
            } catch (RuntimeException error) {
                refused = true;
            }
            Check.that(refused, "it could commit what had been aborted");
            try (KafkaProducer<byte[], byte[]> heir = transactional(run, id)) {
                inOne(heir, topic, "heir");
            }
            Check.equal(read(reader, 1, READ_SECONDS), List.of("3 heir"), "read_committed, by the next of the id");
        } finally {
            producer.close(CLOSE);
        }
    }

    /** Look up producers and transactions as an operator does. Abort an open transaction, and fence its producer. */
    private static void admin(Run run) throws Exception {
        String topic = run.topic(1);
        String id = run.fresh("x");
        TopicPartition partition = new TopicPartition(topic, 0);
        Admin admin = run.clients.admin();
        KafkaProducer<byte[], byte[]> producer = transactional(run, id);
        try (KafkaConsumer<byte[], byte[]> reader = reader(run, topic, 0, "read_committed")) {
            producer.beginTransaction();
            send(producer, List.of(record(topic, 0, "left open")));
            TransactionDescription described = Clients.get(
                    admin.describeTransactions(List.of(id)).description(id));
            Check.equal(described.state(), TransactionState.ONGOING, "the state");
            Check.equal(described.topicPartitions(), Set.of(partition), "its partitions");
            Check.equal(described.transactionTimeoutMs(), 60_000L, "its timeout");
            ProducerState active = state(admin, partition, described.producerId());
            Check.equal(active.producerId(), described.producerId(), "the producer's id");
            Check.equal(active.producerEpoch(), (int) described.producerEpoch(), "the producer's epoch");
            Check.equal(active.lastSequence(), 0, "its last sequence");
            Check.equal(active.currentTransactionStartOffset(), OptionalLong.of(0), "where its transaction starts");
            Check.that(listed(admin, TransactionState.ONGOING).contains(id), "it is not listed as ongoing");
            Check.that(!listed(admin, TransactionState.COMPLETE_COMMIT).contains(id), "it is listed as complete");
            Check.equal(read(reader, 1, NOTHING_SECONDS), List.of(), "read_committed, while the transaction is open");

            AbortTransactionSpec aborted = new AbortTransactionSpec(
                    partition, active.producerId(), (short) active.producerEpoch(), active.coordinatorEpoch().orElse(0));
            Clients.get(admin.abortTransaction(aborted).all());
            DataScenarios.send(run, Map.of(), List.of(record(topic, 0, "behind")));
            Check.equal(read(reader, 1, READ_SECONDS), List.of("2 behind"), "read_committed, once it was aborted");
            Check.equal(
                    state(admin, partition, active.producerId()).currentTransactionStartOffset(),
                    OptionalLong.empty(),
                    "where its transaction starts, once it was aborted");

            Clients.get(admin.fenceProducers(List.of(id)).all());
            fenced(() -> {
                send(producer, List.of(record(topic, 0, "fenced")));
                producer.commitTransaction();
            });
            Check.fails(
                    TransactionalIdNotFoundException.class,
                    () -> Clients.get(admin.describeTransactions(List.of("nobody")).description("nobody")),
                    "describing a transactional id that nobody has");
        } finally {
            producer.close(CLOSE);
        }
    }

    /** Return the state that a partition keeps for a producer. */
    private static ProducerState state(Admin admin, TopicPartition partition, long producerId) {
        return Clients.get(admin.describeProducers(List.of(partition)).partitionResult(partition))
                .activeProducers()
                .stream()
                .filter(state -> state.producerId() == producerId)
                .findFirst()
                .orElseThrow();
    }

    private static List<String> listed(Admin admin, TransactionState state) {
        ListTransactionsOptions options = new ListTransactionsOptions().filterStates(Set.of(state));
        return Clients.get(admin.listTransactions(options).all()).stream()
                .map(TransactionListing::transactionalId)
                .toList();
    }

    private static KafkaProducer<byte[], byte[]> transactional(Run run, String id) {
        return transactional(run, id, 60_000);
    }

    /** Create an initialised producer. An older producer of the id is fenced, and its open transaction is aborted. */
    private static KafkaProducer<byte[], byte[]> transactional(Run run, String id, int timeoutMs) {
        KafkaProducer<byte[], byte[]> producer = run.clients.producer(Map.of(
                "transactional.id", id,
                "transaction.timeout.ms", timeoutMs,
                "max.block.ms", CALL_MS,
                "delivery.timeout.ms", CALL_MS,
                "request.timeout.ms", CALL_MS / 3));
        producer.initTransactions();
        return producer;
    }

    private static void send(KafkaProducer<byte[], byte[]> producer, List<ProducerRecord<byte[], byte[]>> records)
            throws ExecutionException, InterruptedException {
        List<Future<RecordMetadata>> futures = records.stream().map(producer::send).toList();
        for (Future<RecordMetadata> future : futures) {
            future.get();
        }
    }

    /** Send one record in a transaction of its own. */
    private static void inOne(KafkaProducer<byte[], byte[]> producer, String topic, String value) throws Exception {
        producer.beginTransaction();
        send(producer, List.of(record(topic, 0, value)));
        producer.commitTransaction();
    }

    private interface Attempt {
        void make() throws Exception;
    }

    private static void fenced(Attempt attempt) throws Exception {
        try {
            attempt.make();
        } catch (Exception error) {
            for (Throwable cause = error; cause != null; cause = cause.getCause()) {
                if (cause instanceof ProducerFencedException || cause instanceof InvalidProducerEpochException) {
                    return;
                }
            }
            throw error;
        }
        throw new AssertionError("a producer that another one of its id has followed was not fenced");
    }

    private static ProducerRecord<byte[], byte[]> record(String topic, int partition, String value) {
        return new ProducerRecord<>(topic, partition, null, DataScenarios.bytes(value));
    }

    /** Return STEP records for each partition. */
    private static List<ProducerRecord<byte[], byte[]>> steps(String topic, String name, int partitions) {
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (int index = 0; index < STEP; index++) {
            for (int partition = 0; partition < partitions; partition++) {
                records.add(record(topic, partition, name + " " + index));
            }
        }
        return records;
    }

    /** Return what {@link #read} should return for {@link #steps} that begin at offset `start`. */
    private static Stream<String> expected(String name, int start) {
        return IntStream.range(0, STEP).mapToObj(index -> (start + index) + " " + name + " " + index);
    }

    private static KafkaConsumer<byte[], byte[]> reader(Run run, String topic, int partition, String isolation) {
        KafkaConsumer<byte[], byte[]> consumer = run.clients.consumer(Map.of("isolation.level", isolation));
        consumer.assign(List.of(new TopicPartition(topic, partition)));
        return consumer;
    }

    /** Create a group member that commits nothing. A poll returns one record, so it receives no more than requested. */
    private static KafkaConsumer<byte[], byte[]> member(Run run, String group, String topic) {
        return member(run, group, topic, new Moves());
    }

    private static KafkaConsumer<byte[], byte[]> member(Run run, String group, String topic, Moves moves) {
        KafkaConsumer<byte[], byte[]> consumer = run.clients.consumer(
                Map.of("group.id", group, "isolation.level", "read_committed", "max.poll.records", 1));
        consumer.subscribe(List.of(topic), moves);
        return consumer;
    }

    /** Tells whether partitions were revoked. Their records that were polled but not committed are delivered again. */
    private static final class Moves implements ConsumerRebalanceListener {
        private boolean seen;

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            seen |= !partitions.isEmpty();
        }

        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {}

        /** Return whether partitions were revoked since the last call. */
        private boolean next() {
            boolean moved = seen;
            seen = false;
            return moved;
        }
    }

    /** Return the next `count` records, or fewer if they do not arrive in time, or more if a poll returns more. */
    private static List<ConsumerRecord<byte[], byte[]>> poll(
            KafkaConsumer<byte[], byte[]> consumer, int count, double seconds) {
        return poll(consumer, count, seconds, new Moves());
    }

    /**
     * Poll a member in the same way, but drop the records that it received before its last revocation. A client whose
     * only broker was down joins its group again.
     */
    private static List<ConsumerRecord<byte[], byte[]>> poll(
            KafkaConsumer<byte[], byte[]> consumer, int count, double seconds, Moves moves) {
        List<ConsumerRecord<byte[], byte[]>> records = new ArrayList<>();
        long deadline = System.nanoTime() + (long) (seconds * 1e9);
        while (records.size() < count && System.nanoTime() < deadline) {
            var polled = consumer.poll(Duration.ofMillis(100));
            if (moves.next()) {
                records.clear();
            }
            polled.forEach(records::add);
        }
        return records;
    }

    /** Return offsets and values of at least `count` records, or of fewer if they do not arrive in time. */
    private static List<String> read(KafkaConsumer<byte[], byte[]> consumer, int count, double seconds) {
        return poll(consumer, count, seconds).stream()
                .map(record -> record.offset() + " " + new String(record.value(), StandardCharsets.UTF_8))
                .toList();
    }

    private static long end(KafkaConsumer<byte[], byte[]> reader) {
        TopicPartition partition = reader.assignment().iterator().next();
        return reader.endOffsets(List.of(partition)).get(partition);
    }

    /** Produce forty records to two partitions, and return their values. */
    private static List<String> fill(Run run, String topic) {
        List<String> values = IntStream.range(0, 8 * STEP).mapToObj(index -> "v" + index).toList();
        List<ProducerRecord<byte[], byte[]>> records = IntStream.range(0, values.size())
                .mapToObj(index -> record(topic, index % 2, values.get(index)))
                .toList();
        DataScenarios.send(run, Map.of(), records);
        return values;
    }

    /** Begin a transaction, send its records, run `between`, and send its offsets. The caller ends the transaction. */
    private static void transform(
            KafkaProducer<byte[], byte[]> producer,
            KafkaConsumer<byte[], byte[]> reader,
            List<ConsumerRecord<byte[], byte[]>> found,
            String target,
            Attempt between)
            throws Exception {
        producer.beginTransaction();
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        Map<TopicPartition, OffsetAndMetadata> positions = new HashMap<>();
        for (ConsumerRecord<byte[], byte[]> record : found) {
            String value = new String(record.value(), StandardCharsets.UTF_8);
            records.add(record(target, record.partition(), "made of " + value));
            positions.put(
                    new TopicPartition(record.topic(), record.partition()), new OffsetAndMetadata(record.offset() + 1));
        }
        send(producer, records);
        between.make();
        producer.sendOffsetsToTransaction(positions, reader.groupMetadata());
    }

    private static List<Long> committed(Run run, String group, String topic) {
        return Arrays.asList(
                run.clients.committed(group, new TopicPartition(topic, 0)),
                run.clients.committed(group, new TopicPartition(topic, 1)));
    }

    /** Check that each record is once in the target, in its partition's order, and that the group has read them all. */
    private static void exactlyOnce(Run run, String group, String source, String target, List<String> values) {
        for (int partition = 0; partition < 2; partition++) {
            int which = partition;
            List<String> due = IntStream.range(0, values.size())
                    .filter(index -> index % 2 == which)
                    .mapToObj(index -> "made of " + values.get(index))
                    .toList();
            try (KafkaConsumer<byte[], byte[]> reader = reader(run, target, partition, "read_committed")) {
                List<String> found = poll(reader, due.size(), READ_SECONDS).stream()
                        .map(record -> new String(record.value(), StandardCharsets.UTF_8))
                        .toList();
                Check.equal(found, due, "partition " + partition);
                Check.equal(read(reader, 1, NOTHING_SECONDS), List.of(), "partition " + partition + ", behind all");
            }
        }
        try (KafkaConsumer<byte[], byte[]> reader = member(run, group, source)) {
            Check.equal(read(reader, 1, 3 * NOTHING_SECONDS), List.of(), "read again by the group");
        }
    }
}
