package streams;

import java.io.InputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Joined;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.TimeWindows;

/** Runs scenarios of Kafka Streams against the broker at COMPAT_BOOTSTRAP, and prints the results as JSON lines. */
public final class Main {
    private static final List<String> WORDS = List.of("alpha", "beta", "gamma", "delta", "epsilon", "zeta");
    private static final int ROUNDS = 20;
    private static final int MAX_DETAIL = 600;

    /**
     * Kafka too refuses a commit after the transaction timeout, and that ends the application. The default timeout of
     * ten seconds passes while a busy machine restarts the broker.
     */
    private static final Map<String, Object> EXACTLY_ONCE =
            Map.of("processing.guarantee", "exactly_once_v2", "producer.transaction.timeout.ms", 60_000);

    /** The protocol of KIP-1071, in which the broker assigns the tasks. */
    private static final Map<String, Object> ASSIGNED = Map.of("group.protocol", "streams");


    private Main() {}

    /** A scenario's code. It passes if it returns, and fails if it throws. */
    interface Body {
        void act(Scene scene) throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        System.setProperty("org.slf4j.simpleLogger.defaultLogLevel", "warn");
        if (List.of(arguments).contains("-version")) {
            Properties properties = new Properties();
            try (InputStream found = Main.class.getResourceAsStream("/kafka/kafka-streams-version.properties")) {
                properties.load(found);
            }
            System.out.println(properties.getProperty("version"));
            return;
        }
        Map<String, Body> scenarios = new LinkedHashMap<>();
        scenarios.put("streams.repartition", Main::repartition);
        scenarios.put("streams.windows", Main::windows);
        scenarios.put("streams.table-join", Main::tableJoin);
        scenarios.put("streams.restart", Main::restart);
        scenarios.put("streams.two-instances", scene -> twoInstances(scene, Map.of()));
        scenarios.put("streams.gateway-restart", scene -> gatewayRestart(scene, Map.of()));
        scenarios.put("streams.exactly-once", Main::exactlyOnce);
        scenarios.put("streams.exactly-once-gateway-kill", scene -> exactlyOnceGatewayKill(scene, EXACTLY_ONCE));
        scenarios.put("streams.group-protocol-streams", Main::groupProtocolStreams);
        scenarios.put("streams.group-protocol-streams-two-instances", scene -> twoInstances(scene, ASSIGNED));
        scenarios.put("streams.group-protocol-streams-gateway-restart", scene -> gatewayRestart(scene, ASSIGNED));
        scenarios.put(
                "streams.group-protocol-streams-exactly-once-gateway-kill",
                scene -> exactlyOnceGatewayKill(scene, both(ASSIGNED, EXACTLY_ONCE)));
        String chosen = System.getenv().getOrDefault("COMPAT_SCENARIOS", "");
        List<String> named = chosen.isEmpty() ? List.of() : List.of(chosen.split(","));
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        scenarios.forEach((name, body) -> {
            if (named.isEmpty() || named.contains(name)) {
                out.println(answer(name, body));
            }
        });
        // Halt, because threads of an instance that hung would keep the program alive.
        Runtime.getRuntime().halt(0);
    }

    /** Run one scenario. Each wait in it has a limit, so the scenario needs no limit of its own. */
    private static String answer(String name, Body body) {
        long started = System.nanoTime();
        String outcome = "passed";
        String detail = "";
        try (Scene scene = new Scene()) {
            body.act(scene);
        } catch (Exception | AssertionError error) {
            outcome = "failed";
            detail = error instanceof AssertionError ? error.getMessage() : error.toString();
            error.printStackTrace();
        }
        String said = detail.substring(0, Math.min(detail.length(), MAX_DETAIL))
                .replace("\\", "\\\\")
                .replace("\"", "\\\"")
                .replaceAll("\\p{Cntrl}", " ");
        double seconds = (System.nanoTime() - started) / 1e9;
        return String.format(
                Locale.ROOT,
                "{\"scenario\":\"%s\",\"outcome\":\"%s\",\"seconds\":%.2f,\"detail\":\"%s\"}",
                name,
                outcome,
                seconds,
                said);
    }

    /** Return a topology that counts words. It has one repartition topic and one changelog. */
    private static Topology counting(Scene scene) {
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(scene.input, Consumed.with(Serdes.String(), Serdes.String()))
                .groupBy((key, word) -> word, Grouped.with("words", Serdes.String(), Serdes.String()))
                .count(Materialized.as("counts"))
                .toStream()
                .to(scene.output, Produced.with(Serdes.String(), Serdes.Long()));
        return builder.build();
    }

    private static Map<String, Long> each(long count) {
        Map<String, Long> expected = new LinkedHashMap<>();
        WORDS.forEach(word -> expected.put(word, count));
        return expected;
    }

    private static void repartition(Scene scene) throws Exception {
        scene.start(counting(scene));
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(ROUNDS));
        String repartition = scene.application + "-words-repartition";
        String changelog = scene.application + "-counts-changelog";
        Scene.equal(scene.partitions(repartition), Scene.PARTITIONS, "partitions of the repartition topic");
        Scene.equal(scene.config(repartition, "cleanup.policy"), "delete", "its cleanup.policy");
        Scene.equal(scene.config(repartition, "retention.ms"), "-1", "its retention.ms");
        Scene.equal(scene.partitions(changelog), Scene.PARTITIONS, "partitions of the changelog");
        Scene.equal(scene.config(changelog, "cleanup.policy"), "compact", "its cleanup.policy");
    }

    private static void windows(Scene scene) throws Exception {
        Duration size = Duration.ofSeconds(10);
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(scene.input, Consumed.with(Serdes.String(), Serdes.String()))
                .groupBy((key, word) -> word, Grouped.with("words", Serdes.String(), Serdes.String()))
                .windowedBy(TimeWindows.ofSizeAndGrace(size, Duration.ofHours(1)))
                .count(Materialized.as("windowed"))
                .toStream()
                .map((window, count) -> KeyValue.pair(window.key() + "@" + window.window().start(), count))
                .to(scene.output, Produced.with(Serdes.String(), Serdes.Long()));
        scene.start(builder.build());
        // Each word comes once per second from the beginning of a window, so ten times in each window.
        long first = System.currentTimeMillis() / size.toMillis() * size.toMillis() - 10 * size.toMillis();
        scene.produce(scene.input, WORDS, ROUNDS, first, 1000);
        Map<String, Long> expected = new LinkedHashMap<>();
        for (String word : WORDS) {
            expected.put(word + "@" + first, 10L);
            expected.put(word + "@" + (first + size.toMillis()), 10L);
        }
        scene.awaitOutput(expected);
        String policy = scene.config(scene.application + "-windowed-changelog", "cleanup.policy");
        Scene.equal(List.of(policy.split(",")).stream().sorted().toList(), List.of("compact", "delete"), "changelog");
    }

    private static void tableJoin(Scene scene) throws Exception {
        String numbers = scene.application + "-table";
        scene.create(numbers);
        StreamsBuilder builder = new StreamsBuilder();
        var table = builder.table(numbers, Consumed.with(Serdes.String(), Serdes.String()))
                .groupBy((key, value) -> KeyValue.pair(value, value), Grouped.with("rows", Serdes.String(), Serdes.String()))
                .count(Materialized.as("rows"));
        builder.stream(scene.input, Consumed.with(Serdes.String(), Serdes.String()))
                .selectKey((key, word) -> word)
                .join(table, (word, count) -> count, Joined.with(Serdes.String(), Serdes.String(), Serdes.Long()))
                .to(scene.output, Produced.with(Serdes.String(), Serdes.Long()));
        scene.start(builder.build());
        scene.produce(numbers, WORDS, 1);
        // A record that is processed before its table row joins nothing, so wait for the rows.
        scene.awaitRecords(scene.application + "-rows-changelog", WORDS.size());
        scene.produce(scene.input, WORDS, 1);
        scene.awaitOutput(each(1));
    }

    private static void restart(Scene scene) throws Exception {
        KafkaStreams first = scene.start(counting(scene));
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(ROUNDS));
        scene.stop(first);
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.start(counting(scene));
        scene.awaitOutput(each(2 * ROUNDS));
    }

    private static void twoInstances(Scene scene, Map<String, Object> settings) throws Exception {
        KafkaStreams first = scene.start(counting(scene), settings);
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(ROUNDS));
        KafkaStreams second = scene.start(counting(scene), settings);
        int tasks = 2 * Scene.PARTITIONS;
        scene.eventually(
                () -> Scene.activeTasks(first) == tasks / 2 && Scene.activeTasks(second) == tasks / 2,
                () -> "tasks are " + Scene.activeTasks(first) + " and " + Scene.activeTasks(second));
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(2 * ROUNDS));
        scene.stop(first);
        scene.eventually(() -> Scene.activeTasks(second) == tasks, () -> "tasks are " + Scene.activeTasks(second));
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(3 * ROUNDS));
    }

    private static void gatewayRestart(Scene scene, Map<String, Object> settings) throws Exception {
        scene.start(counting(scene), settings);
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(ROUNDS));
        // Wait for the commit. A restart before the commit may count records twice, which at-least-once allows.
        Thread.sleep(1000);
        scene.restartBroker("restart");
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(2 * ROUNDS));
    }

    private static void exactlyOnce(Scene scene) throws Exception {
        KafkaStreams first = scene.start(counting(scene), EXACTLY_ONCE);
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(ROUNDS), "read_committed");
        scene.stop(first);
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.start(counting(scene), EXACTLY_ONCE);
        scene.awaitOutput(each(2 * ROUNDS), "read_committed");
    }

    /** Kill the gateway while the application counts. No record is counted twice, committed before the kill or not. */
    private static void exactlyOnceGatewayKill(Scene scene, Map<String, Object> settings) throws Exception {
        scene.start(counting(scene), settings);
        for (int times = 1; times <= 3; times++) {
            scene.produce(scene.input, WORDS, ROUNDS);
            scene.restartBroker("kill");
        }
        scene.awaitOutput(each(3 * ROUNDS), "read_committed");
    }

    private static Map<String, Object> both(Map<String, Object> some, Map<String, Object> more) {
        Map<String, Object> all = new LinkedHashMap<>(some);
        all.putAll(more);
        return all;
    }

    private static void groupProtocolStreams(Scene scene) throws Exception {
        scene.start(counting(scene), ASSIGNED);
        scene.produce(scene.input, WORDS, ROUNDS);
        scene.awaitOutput(each(ROUNDS));
    }
}
