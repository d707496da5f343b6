package compat;

import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.consumer.RoundRobinAssignor;
import org.apache.kafka.clients.consumer.StickyAssignor;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.FencedInstanceIdException;
import org.apache.kafka.common.errors.RebalanceInProgressException;

/**
 * A consumer on a thread of its own. It polls until {@link #requestStop}, and then closes cleanly: a dynamic member
 * sends LeaveGroup. An error that ends it earlier is added to the failures, unless the member is fenced and {@link
 * #expectFencing} was called.
 */
final class Member extends Thread implements ConsumerRebalanceListener {
    static final Map<String, String> ASSIGNORS = Map.of(
            "range", RangeAssignor.class.getName(),
            "roundrobin", RoundRobinAssignor.class.getName(),
            "sticky", StickyAssignor.class.getName(),
            "cooperative-sticky", CooperativeStickyAssignor.class.getName());

    private static final long STOP_MS = 30_000;
    private static final long LATE_NS = 1_500_000_000L;

    private final Clients clients;
    private final MemberOptions options;
    private final Journal journal;
    private final Failures failures;
    private final CountDownLatch fenced = new CountDownLatch(1);
    private final AtomicReference<List<String>> newTopics = new AtomicReference<>();
    private volatile boolean stopRequested;
    private volatile boolean fencingExpected;
    private volatile CountDownLatch stall;
    private KafkaConsumer<byte[], byte[]> consumer;
    /** Offsets to commit after processing, at `lateAtNs`, even if another member owns the partitions by then. */
    private final Map<TopicPartition, OffsetAndMetadata> late = new HashMap<>();
    private Long lateAtNs;

    Member(Clients clients, MemberOptions options, Journal journal, Failures failures) {
        super(options.name());
        setDaemon(true);
        this.clients = clients;
        this.options = options;
        this.journal = journal;
        this.failures = failures;
    }

    @Override
    public void run() {
        try {
            open();
            try {
                while (!stopRequested) {
                    List<String> changed = newTopics.getAndSet(null);
                    if (changed != null) {
                        consumer.subscribe(changed, this);
                    }
                    poll();
                    CountDownLatch waitFor = stall;
                    if (waitFor != null) {
                        waitFor.await();
                    }
                }
            } finally {
                close();
            }
        } catch (FencedInstanceIdException error) {
            fenced.countDown();
            if (!fencingExpected) {
                failures.add(options.name() + ": " + error);
            }
        } catch (RuntimeException | InterruptedException error) {
            error.printStackTrace();
            failures.add(options.name() + ": " + error);
        } finally {
            journal.closed(options.name());
        }
    }

    private void open() {
        Map<String, Object> configs = new HashMap<>();
        configs.put("group.id", options.group());
        configs.put("enable.auto.commit", options.commit().equals("auto"));
        configs.put("auto.commit.interval.ms", 1000);
        configs.put("max.poll.interval.ms", options.maxPollIntervalMs());
        if (options.instanceId() != null) {
            configs.put("group.instance.id", options.instanceId());
        }
        if (!options.isServerSide()) {
            configs.put("session.timeout.ms", options.sessionTimeoutMs());
        }
        if (!options.assignors().isEmpty() && !options.isServerSide()) {
            configs.put(
                    "partition.assignment.strategy",
                    options.assignors().stream().map(ASSIGNORS::get).toList());
        }
        consumer = options.isServerSide() ? clients.serverSideConsumer(configs) : clients.consumer(configs);
        if (options.pattern() != null && options.isServerSide()) {
            subscribeAtServer(options.pattern().pattern());
        } else if (options.pattern() != null) {
            consumer.subscribe(options.pattern(), this);
        } else {
            consumer.subscribe(options.topics(), this);
        }
    }

    /**
     * Subscribe to a pattern that the coordinator matches. This needs reflection, because the code is also compiled
     * against clients before 4.0, which lack the pattern's class.
     */
    private void subscribeAtServer(String pattern) {
        try {
            Class<?> type = Class.forName("org.apache.kafka.clients.consumer.SubscriptionPattern");
            Object wanted = type.getConstructor(String.class).newInstance(pattern);
            consumer.getClass().getMethod("subscribe", type, ConsumerRebalanceListener.class).invoke(consumer, wanted, this);
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    private void poll() {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
            journal.delivered(options.name(), record.topic(), record.partition(), record.offset());
            if (options.commit().equals("each")) {
                consumer.commitSync(Map.of(
                        new TopicPartition(record.topic(), record.partition()),
                        new OffsetAndMetadata(record.offset() + 1)));
            } else if (options.commit().equals("late")) {
                late.put(
                        new TopicPartition(record.topic(), record.partition()),
                        new OffsetAndMetadata(record.offset() + 1));
            }
        }
        if (lateAtNs != null && System.nanoTime() > lateAtNs) {
            commitLate();
        }
    }

    /**
     * Commit as an application with a pool of workers does, some time after the revocation. A commit is refused while
     * the group is between two generations. The next attempt follows after LATE_NS.
     */
    private void commitLate() {
        try {
            consumer.commitSync(late, Duration.ofSeconds(10));
        } catch (RebalanceInProgressException | CommitFailedException error) {
            System.err.println(options.name() + " commits later: " + error);
        }
        lateAtNs = System.nanoTime() + LATE_NS;
    }

    private void close() {
        try {
            consumer.close(Duration.ofSeconds(10));
        } catch (FencedInstanceIdException error) {
            fenced.countDown();
        } catch (KafkaException error) {
            failures.add(options.name() + " closing: " + error);
        }
    }

    @Override
    public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
        journal.ownership("assigned", options.name(), partitions);
    }

    @Override
    public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
        if (options.commitsWhenRevoked() && !partitions.isEmpty()) {
            consumer.commitSync(Duration.ofSeconds(10));
        }
        if (options.commit().equals("late") && !partitions.isEmpty() && lateAtNs == null) {
            lateAtNs = System.nanoTime() + LATE_NS;
        }
        journal.ownership("revoked", options.name(), partitions);
    }

    @Override
    public void onPartitionsLost(Collection<TopicPartition> partitions) {
        journal.ownership("lost", options.name(), partitions);
    }

    /** Subscribe to other topics before the next poll. */
    void changeTopics(String... topics) {
        newTopics.set(List.of(topics));
    }

    /** Stop polling, like an application that is busy with a record. The heartbeats continue. */
    void stall() {
        stall = new CountDownLatch(1);
    }

    void proceed() {
        CountDownLatch ended = stall;
        stall = null;
        if (ended != null) {
            ended.countDown();
        }
    }

    void requestStop() {
        stopRequested = true;
        proceed();
    }

    /** Close cleanly. Throw an AssertionError if that takes too long. */
    void finish() throws InterruptedException {
        requestStop();
        join(STOP_MS);
        if (isAlive()) {
            throw new AssertionError(options.name() + " did not close in " + STOP_MS + " ms");
        }
    }

    /** Expect that another member takes over this member's group.instance.id. */
    void expectFencing() {
        fencingExpected = true;
    }

    void waitFenced() throws InterruptedException {
        if (!fenced.await(STOP_MS, TimeUnit.MILLISECONDS)) {
            throw new AssertionError(options.name() + " was not fenced");
        }
    }
}
