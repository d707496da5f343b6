package compat;

import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListOffsetsResult.ListOffsetsResultInfo;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Producers, consumers and the admin client with common settings, and the admin calls that many scenarios need. */
final class Clients implements AutoCloseable {
    /** Client id of every client of this program. It may be shared, because a client id is for display only. */
    static final String CLIENT_ID = "same-for-all";

    static final int SESSION_TIMEOUT_MS = 6000;
    private static final int CALL_SECONDS = 30;

    final String bootstrap;
    private Admin admin;

    Clients(String bootstrap) {
        this.bootstrap = bootstrap;
    }

    private Map<String, Object> common() {
        Map<String, Object> configs = new HashMap<>();
        configs.put("bootstrap.servers", bootstrap);
        configs.put("client.id", CLIENT_ID);
        configs.put("reconnect.backoff.max.ms", 500);
        configs.put("metadata.max.age.ms", 1000);
        return configs;
    }

    synchronized Admin admin() {
        if (admin == null) {
            admin = Admin.create(common());
        }
        return admin;
    }

    KafkaProducer<byte[], byte[]> producer(Map<String, Object> more) {
        Map<String, Object> configs = common();
        configs.put("acks", "all");
        configs.put("linger.ms", 0);
        configs.put("max.request.size", 2_000_000);
        configs.putAll(more);
        return new KafkaProducer<>(configs, new ByteArraySerializer(), new ByteArraySerializer());
    }

    /** Create a consumer that commits no offsets, unless `more` enables auto-commit or the caller commits. */
    KafkaConsumer<byte[], byte[]> consumer(Map<String, Object> more) {
        return new KafkaConsumer<>(consumerConfigs(more), new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    Map<String, Object> consumerConfigs(Map<String, Object> more) {
        Map<String, Object> configs = common();
        configs.put("group.protocol", "classic");
        configs.put("auto.offset.reset", "earliest");
        configs.put("enable.auto.commit", false);
        // Otherwise a client that still asks for a deleted topic creates it again.
        configs.put("allow.auto.create.topics", false);
        configs.put("session.timeout.ms", SESSION_TIMEOUT_MS);
        configs.put("heartbeat.interval.ms", 500);
        configs.putAll(more);
        return configs;
    }

    /** Create a consumer of the consumer protocol, whose session timeout and heartbeat interval the broker decides. */
    KafkaConsumer<byte[], byte[]> serverSideConsumer(Map<String, Object> more) {
        Map<String, Object> configs = consumerConfigs(more);
        configs.put("group.protocol", "consumer");
        configs.remove("session.timeout.ms");
        configs.remove("heartbeat.interval.ms");
        return new KafkaConsumer<>(configs, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    /**
     * Create a share consumer. The broker decides its session timeout and heartbeat interval, and the group's config
     * decides where it begins to read. `mode` is implicit or explicit.
     */
    KafkaShareConsumer<byte[], byte[]> shareConsumer(String group, String mode) {
        Map<String, Object> configs = common();
        configs.put("group.id", group);
        configs.put("share.acknowledgement.mode", mode);
        return new KafkaShareConsumer<>(configs, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    void createTopic(String topic, int partitions) {
        get(admin().createTopics(List.of(new NewTopic(topic, partitions, (short) 1))).all());
    }

    void deleteTopic(String topic) {
        get(admin().deleteTopics(List.of(topic)).all());
    }

    void addPartitions(String topic, int total) {
        get(admin().createPartitions(Map.of(topic, NewPartitions.increaseTo(total))).all());
    }

    /** Commit offsets through the admin client, without being a member. */
    void commit(String group, String topic, int partitions, long offset) {
        Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
        for (int partition = 0; partition < partitions; partition++) {
            offsets.put(new TopicPartition(topic, partition), new OffsetAndMetadata(offset));
        }
        get(admin().alterConsumerGroupOffsets(group, offsets).all());
    }

    /** Return the committed offset, or null if there is none. */
    Long committed(String group, TopicPartition partition) {
        OffsetAndMetadata found =
                get(admin().listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).get(partition);
        return found == null ? null : found.offset();
    }

    Map<TopicPartition, Long> offsets(Collection<TopicPartition> partitions, OffsetSpec specification) {
        Map<TopicPartition, OffsetSpec> asked =
                partitions.stream().collect(Collectors.toMap(partition -> partition, partition -> specification));
        Map<TopicPartition, ListOffsetsResultInfo> found = get(admin().listOffsets(asked).all());
        return found.entrySet().stream().collect(Collectors.toMap(Map.Entry::getKey, entry -> entry.getValue().offset()));
    }

    static Set<TopicPartition> allOf(String topic, int partitions) {
        return java.util.stream.IntStream.range(0, partitions)
                .mapToObj(partition -> new TopicPartition(topic, partition))
                .collect(Collectors.toSet());
    }

    /** Return the result of a call. If the call fails, throw an AssertionError with its error as the cause. */
    static <T> T get(Future<T> future) {
        try {
            return future.get(CALL_SECONDS, TimeUnit.SECONDS);
        } catch (ExecutionException error) {
            throw new AssertionError(error.getCause().toString(), error.getCause());
        } catch (TimeoutException error) {
            throw new AssertionError("no answer in " + CALL_SECONDS + " s", error);
        } catch (InterruptedException error) {
            throw new AssertionError("interrupted", error);
        }
    }

    @Override
    public synchronized void close() {
        if (admin != null) {
            admin.close(Duration.ofSeconds(2));
        }
    }
}
