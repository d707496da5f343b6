package streams;

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListOffsetsResult;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.LongDeserializer;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.Topology;

/** The application id, topics and instances of one scenario. `close` ends every instance that it started. */
final class Scene implements AutoCloseable {
    static final int PARTITIONS = 4;
    private static final int CALL_SECONDS = 30;
    private static final int LIMIT_SECONDS = 45;
    private static final int POLL_MS = 50;

    final String application = "app-" + UUID.randomUUID().toString().substring(24);
    final String input = application + "-in";
    final String output = application + "-out";
    private final String bootstrap = System.getenv("COMPAT_BOOTSTRAP");
    private final Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap));
    private final List<KafkaStreams> instances = new ArrayList<>();
    private final List<Throwable> deaths = new ArrayList<>();

    Scene() throws Exception {
        create(input);
        create(output);
    }

    void create(String topic) throws Exception {
        admin.createTopics(List.of(new NewTopic(topic, PARTITIONS, (short) 1))).all().get(CALL_SECONDS, TimeUnit.SECONDS);
    }

    /** Start an instance and wait until it runs. `more` overrides its configuration. */
    KafkaStreams start(Topology topology, Map<String, Object> more) throws Exception {
        Properties properties = new Properties();
        properties.put("application.id", application);
        properties.put("bootstrap.servers", bootstrap);
        properties.put("state.dir", Files.createTempDirectory("streams").toString());
        properties.put("commit.interval.ms", 200);
        properties.put("statestore.cache.max.bytes", 0);
        properties.put("replication.factor", 1);
        properties.put("metadata.max.age.ms", 1000);
        // With stores in memory, an instance can restore its state after a start only from its changelogs.
        properties.put(
                "dsl.store.suppliers.class",
                "org.apache.kafka.streams.state.BuiltInDslStoreSuppliers$InMemoryDslStoreSuppliers");
        if (!more.containsKey("group.protocol")) {
            properties.put("session.timeout.ms", 6000);
            properties.put("heartbeat.interval.ms", 500);
        }
        properties.putAll(more);
        KafkaStreams instance = new KafkaStreams(topology, properties);
        instance.setUncaughtExceptionHandler(error -> {
            synchronized (deaths) {
                deaths.add(error);
            }
            return org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse
                    .SHUTDOWN_CLIENT;
        });
        instances.add(instance);
        instance.start();
        eventually(() -> instance.state() == KafkaStreams.State.RUNNING, () -> "an instance is " + instance.state());
        return instance;
    }

    KafkaStreams start(Topology topology) throws Exception {
        return start(topology, Map.of());
    }

    void stop(KafkaStreams instance) {
        if (!instance.close(Duration.ofSeconds(CALL_SECONDS))) {
            throw new AssertionError("an instance did not close in " + CALL_SECONDS + " s");
        }
    }

    /** Send each value `times` times over the partitions, with itself as the key, and wait for the acknowledgements. */
    void produce(String topic, List<String> values, int times, long firstTimestamp, long stepMs) throws Exception {
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(
                Map.of("bootstrap.servers", bootstrap), new StringSerializer(), new StringSerializer())) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int round = 0; round < times; round++) {
                for (String value : values) {
                    long timestamp = firstTimestamp + round * stepMs;
                    sent.add(producer.send(new ProducerRecord<>(topic, round % PARTITIONS, timestamp, value, value)));
                }
            }
            for (Future<RecordMetadata> record : sent) {
                record.get(CALL_SECONDS, TimeUnit.SECONDS);
            }
        }
    }

    void produce(String topic, List<String> values, int times) throws Exception {
        produce(topic, values, times, System.currentTimeMillis(), 0);
    }

    /** Wait until the newest value of each key in the output is as expected. Fail at once if a value is too high. */
    void awaitOutput(Map<String, Long> expected, String isolation) throws Exception {
        Map<String, Long> newest = new HashMap<>();
        Map<String, Object> configs = Map.of("bootstrap.servers", bootstrap, "isolation.level", isolation);
        try (KafkaConsumer<String, Long> consumer =
                new KafkaConsumer<>(configs, new StringDeserializer(), new LongDeserializer())) {
            List<TopicPartition> partitions = new ArrayList<>();
            for (int partition = 0; partition < PARTITIONS; partition++) {
                partitions.add(new TopicPartition(output, partition));
            }
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            eventually(
                    () -> {
                        for (ConsumerRecord<String, Long> record : consumer.poll(Duration.ofMillis(POLL_MS))) {
                            newest.put(record.key(), record.value());
                        }
                        newest.forEach((key, value) -> {
                            if (value > expected.getOrDefault(key, 0L)) {
                                throw new AssertionError(key + " is " + value + ", not " + expected.get(key));
                            }
                        });
                        return newest.equals(expected);
                    },
                    () -> "output is " + newest + ", not " + expected);
        }
    }

    void awaitOutput(Map<String, Long> expected) throws Exception {
        awaitOutput(expected, "read_uncommitted");
    }

    /** Wait until at least `count` records have been written to the topic. */
    void awaitRecords(String topic, long count) throws Exception {
        Map<TopicPartition, OffsetSpec> latest = new HashMap<>();
        for (int partition = 0; partition < PARTITIONS; partition++) {
            latest.put(new TopicPartition(topic, partition), OffsetSpec.latest());
        }
        eventually(
                () -> admin.listOffsets(latest).all().get(CALL_SECONDS, TimeUnit.SECONDS).values().stream()
                                .mapToLong(ListOffsetsResult.ListOffsetsResultInfo::offset)
                                .sum()
                        >= count,
                () -> topic + " has fewer records than " + count);
    }

    /** Return one config of a topic that Streams created. */
    String config(String topic, String name) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        return admin.describeConfigs(List.of(resource))
                .all()
                .get(CALL_SECONDS, TimeUnit.SECONDS)
                .get(resource)
                .get(name)
                .value();
    }

    int partitions(String topic) throws Exception {
        return admin.describeTopics(List.of(topic))
                .allTopicNames()
                .get(CALL_SECONDS, TimeUnit.SECONDS)
                .get(topic)
                .partitions()
                .size();
    }

    /** Return the number of active tasks of an instance. */
    static int activeTasks(KafkaStreams instance) {
        return instance.metadataForLocalThreads().stream()
                .mapToInt(thread -> thread.activeTasks().size())
                .sum();
    }

    /** Restart or kill the broker, as `how` says, and return when the broker serves again. */
    void restartBroker(String how) throws Exception {
        URI door = URI.create(System.getenv("COMPAT_CONTROL") + "/" + how);
        HttpRequest request = HttpRequest.newBuilder(door)
                .timeout(Duration.ofSeconds(90))
                .POST(HttpRequest.BodyPublishers.noBody())
                .build();
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
        equal(answer.statusCode(), 200, how + ": " + answer.body());
    }

    /** Evaluate the condition again and again until it is true. Fail after LIMIT_SECONDS or if an instance dies. */
    void eventually(Callable<Boolean> condition, Callable<String> what) throws Exception {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_SECONDS);
        while (!condition.call()) {
            synchronized (deaths) {
                if (!deaths.isEmpty()) {
                    Throwable root = deaths.get(0);
                    while (root.getCause() != null) {
                        root = root.getCause();
                    }
                    throw new AssertionError("an instance died: " + root, deaths.get(0));
                }
            }
            if (System.nanoTime() > deadline) {
                throw new AssertionError(what.call() + ", after " + LIMIT_SECONDS + " s");
            }
            Thread.sleep(POLL_MS);
        }
    }

    static void equal(Object actual, Object expected, String what) {
        if (!expected.equals(actual)) {
            throw new AssertionError(what + ": " + actual + ", not " + expected);
        }
    }

    @Override
    public void close() {
        instances.forEach(instance -> instance.close(Duration.ofSeconds(5)));
        admin.close(Duration.ofSeconds(2));
    }
}
