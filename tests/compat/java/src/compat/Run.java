package compat;

import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.producer.KafkaProducer;

/** The names, delivery log, members and feeds of one scenario. `close` stops all that the scenario left running. */
final class Run implements AutoCloseable {
    final Clients clients;
    final Failures failures = new Failures();
    String detail = "";
    private final Path path;
    private final Deque<AutoCloseable> open = new ArrayDeque<>();
    private Journal journal;

    Run(String name, Clients clients) {
        this.clients = clients;
        path = Path.of(System.getenv("COMPAT_DELIVERIES"))
                .resolve(Main.environment("COMPAT_SUITE", "java") + "." + name + ".jsonl");
    }

    /** Create a topic with a fresh name. */
    String topic(int partitions, String prefix) {
        String name = fresh(prefix);
        clients.createTopic(name, partitions);
        return name;
    }

    String topic(int partitions) {
        return topic(partitions, "t");
    }

    String fresh(String prefix) {
        return prefix + "-" + UUID.randomUUID().toString().substring(24);
    }

    /** Create the delivery log, and return a view of it. */
    View journal(String topic, int partitions, boolean cooperative, boolean redeliveryAllowed) throws IOException {
        journal = new Journal(path);
        open.push(journal);
        journal.scenario(topic, partitions, cooperative, redeliveryAllowed);
        return new View(path, failures);
    }

    View journal(String topic, int partitions) throws IOException {
        return journal(topic, partitions, false, false);
    }

    Journal journal() {
        return journal;
    }

    Member start(MemberOptions options) {
        Member member = new Member(clients, options, journal, failures);
        open.push(() -> {
            member.requestStop();
            member.join(2000);
        });
        member.start();
        return member;
    }

    /** Start a member in a process of its own. */
    Child spawn(MemberOptions options) throws IOException {
        Child child = new Child(clients, options, journal);
        open.push(child::end);
        return child;
    }

    /** Start a feed. A scenario stops the feed before its last assertion. */
    Feed feed(String topic, int partitions, boolean outage) {
        Feed feed = new Feed(clients, topic, partitions, journal, failures, outage);
        open.push(feed::requestStop);
        feed.start();
        return feed;
    }

    Feed feed(String topic, int partitions) {
        return feed(topic, partitions, false);
    }

    /** Send `rounds` records to each partition, and wait for the acknowledgements. */
    void produce(String topic, int partitions, int rounds) throws ExecutionException, InterruptedException {
        try (KafkaProducer<byte[], byte[]> producer = clients.producer(Map.of())) {
            for (int round = 0; round < rounds; round++) {
                Feed.round(producer, topic, partitions, journal, false);
            }
        }
    }

    /** Restart or kill the gateway, as `action` says, and return when the gateway serves again. */
    void gateway(String action) throws IOException, InterruptedException {
        String control = System.getenv("COMPAT_CONTROL");
        if (control == null) {
            throw new Unsupported("no COMPAT_CONTROL");
        }
        HttpRequest request = HttpRequest.newBuilder(URI.create(control + "/" + action))
                .timeout(Duration.ofSeconds(90))
                .POST(HttpRequest.BodyPublishers.noBody())
                .build();
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
        if (answer.statusCode() != 200) {
            throw new AssertionError(action + ": " + answer.statusCode() + " " + answer.body());
        }
    }

    @Override
    public void close() throws Exception {
        while (!open.isEmpty()) {
            open.pop().close();
        }
    }
}
