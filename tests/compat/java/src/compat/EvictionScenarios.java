package compat;

import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;

/**
 * Scenarios in which an administrator removes a member while its application works. The member's commit is refused, and
 * the member joins again.
 */
final class EvictionScenarios {
    private static final int PARTITIONS = 2;
    private static final int RECORDS = 20;
    private static final double PATIENCE_SECONDS = 45;

    private EvictionScenarios() {}

    static void register(Map<String, Body> scenarios) {
        for (String assignor : List.of("range", "cooperative-sticky")) {
            scenarios.put("groups.evicted." + assignor, run -> evicted(run, assignor));
        }
    }

    private static void evicted(Run run, String assignor) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        try (KafkaProducer<byte[], byte[]> producer = run.clients.producer(Map.of())) {
            for (int record = 0; record < RECORDS; record++) {
                producer.send(new ProducerRecord<>(topic, record % PARTITIONS, null, new byte[1]));
            }
        }
        Heard heard = new Heard();
        Map<String, Object> configs = Map.of(
                "group.id", group, "partition.assignment.strategy", List.of(Member.ASSIGNORS.get(assignor)));
        try (KafkaConsumer<byte[], byte[]> consumer = run.clients.consumer(configs)) {
            consumer.subscribe(List.of(topic), heard);
            Map<TopicPartition, OffsetAndMetadata> read = readAll(consumer);
            Clients.get(run.clients
                    .admin()
                    .removeMembersFromConsumerGroup(group, new RemoveMembersFromConsumerGroupOptions())
                    .all());
            Check.fails(
                    CommitFailedException.class,
                    () -> {
                        consumer.commitSync(read);
                        return null;
                    },
                    "the commit of who was removed");
            Check.equal(readAll(consumer), read, "what it reads again, since nothing is committed");
            Check.equal(heard.lost, Clients.allOf(topic, PARTITIONS), "what it was told to have lost");
            Check.equal(heard.revoked, Set.of(), "what it was asked to give up");
            consumer.commitSync(read);
        }
        for (int partition = 0; partition < PARTITIONS; partition++) {
            Long committed = run.clients.committed(group, new TopicPartition(topic, partition));
            Check.equal(committed, (long) RECORDS / PARTITIONS, "committed");
        }
    }

    /** Read all records, and return for each partition the offset after its last record. */
    private static Map<TopicPartition, OffsetAndMetadata> readAll(KafkaConsumer<byte[], byte[]> consumer)
            throws Exception {
        Map<TopicPartition, OffsetAndMetadata> read = new HashMap<>();
        Check.eventually(
                () -> {
                    for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
                        read.put(
                                new TopicPartition(record.topic(), record.partition()),
                                new OffsetAndMetadata(record.offset() + 1));
                    }
                    return read.values().stream().mapToLong(OffsetAndMetadata::offset).sum() == RECORDS;
                },
                "all records are read",
                PATIENCE_SECONDS);
        return read;
    }

    /** The partitions that the client has reported to the application as lost or revoked. */
    private static final class Heard implements ConsumerRebalanceListener {
        final Set<TopicPartition> lost = new HashSet<>();
        final Set<TopicPartition> revoked = new HashSet<>();

        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {}

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            revoked.addAll(partitions);
        }

        @Override
        public void onPartitionsLost(Collection<TopicPartition> partitions) {
            lost.addAll(partitions);
        }
    }
}
