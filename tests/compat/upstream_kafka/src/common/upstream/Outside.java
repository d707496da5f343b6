package upstream;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.io.InputStream;
import java.net.HttpURLConnection;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AdminClientConfig;

/** Brokers outside of this process, fresh for one test: whoever started us makes and ends them at its door. */
public final class Outside implements AutoCloseable {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int READ_MS = 90_000;

    private static volatile String latest;
    private static volatile List<String> metrics = List.of();

    private final String door;
    private final String number;
    private final String bootstrap;
    private final String secured;
    private final String controllers;
    private final boolean from0;

    /** Addresses are in the order of the brokers' ids. */
    private Outside(
            String door, String number, String bootstrap, String secured, String controllers, boolean from0) {
        this.door = door;
        this.number = number;
        this.bootstrap = bootstrap;
        this.secured = secured;
        this.controllers = controllers;
        this.from0 = from0;
    }

    /**
     * `settings` have Kafka's names; what the brokers outside do not know is left out by whoever makes them. `racks` are
     * the brokers' in the order of their ids, empty where one has none.
     */
    public static Outside open(int brokers, Map<String, String> settings, List<String> racks, String test) {
        return open(brokers, 0, true, settings, racks, test);
    }

    /** `combined`: the first brokers are the controllers; else these are processes of their own. */
    public static Outside open(
            int brokers,
            int controllers,
            boolean combined,
            Map<String, String> settings,
            List<String> racks,
            String test) {
        return open(Map.of(
                "brokers", brokers,
                "controllers", controllers,
                "combined", combined,
                "settings", settings,
                "racks", racks,
                "test", test));
    }

    /**
     * They have a listener of this security protocol beside the one where nobody is asked, and know these users from the
     * beginning.
     */
    public static Outside openSecured(
            int brokers, Map<String, String> settings, String test, String protocol, List<String> scramUsers) {
        return open(Map.of(
                "brokers", brokers, "settings", settings, "test", test, "protocol", protocol, "users", scramUsers));
    }

    private static Outside open(Map<String, ?> asked) {
        String door = System.getenv("UPSTREAM_DOOR");
        JsonNode made = post(door + "/open", asked);
        latest = local(made, "bootstrap");
        String secured = made.has("secured") ? local(made, "secured") : latest;
        List<String> addresses = new ArrayList<>();
        made.path("metrics").forEach(address -> addresses.add(address.asText()));
        metrics = addresses;
        return new Outside(
                door,
                made.get("number").asText(),
                latest,
                secured,
                local(made, "controllers"),
                made.path("from_0").asBoolean());
    }

    /** As brokers call themselves inside of a test's process. */
    private static String local(JsonNode made, String name) {
        return made.get(name).asText().replace("127.0.0.1", "localhost");
    }

    /** Where the brokers are that were made last: tests run one after the other. */
    static String latest() {
        return latest;
    }

    /** Where those that were made last say what they have counted; empty where they ask nobody who they are. */
    static List<String> metrics() {
        return metrics;
    }

    public String bootstrap() {
        return bootstrap;
    }

    /** Where clients say who they are, if they have to. */
    public String secured() {
        return secured;
    }

    /** The first broker's number; those of the others follow. */
    public int first() {
        return from0 ? 0 : 1;
    }

    public String controllers() {
        return controllers;
    }

    public List<Integer> ports() {
        return ports(bootstrap);
    }

    public List<Integer> controllerPorts() {
        return ports(controllers);
    }

    private static List<Integer> ports(String addresses) {
        List<Integer> ports = new ArrayList<>();
        for (String address : addresses.split(",")) {
            ports.add(Integer.valueOf(address.substring(address.lastIndexOf(':') + 1)));
        }
        return ports;
    }

    public String clusterId() throws ExecutionException, InterruptedException {
        try (Admin admin = Admin.create(Map.of(AdminClientConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap))) {
            return admin.describeCluster().clusterId().get();
        }
    }

    /** `action` is start, stop or kill; `broker` counts from 0. */
    public void tell(String action, int broker) {
        post(door + "/" + action, Map.of("number", number, "broker", broker));
    }

    @Override
    public void close() {
        post(door + "/close", Map.of("number", number));
    }

    private static JsonNode post(String address, Map<String, ?> said) {
        try {
            HttpURLConnection connection = (HttpURLConnection) URI.create(address).toURL().openConnection();
            connection.setRequestMethod("POST");
            connection.setDoOutput(true);
            connection.setReadTimeout(READ_MS);
            connection.getOutputStream().write(JSON.writeValueAsBytes(said));
            if (connection.getResponseCode() != 200) {
                try (InputStream error = connection.getErrorStream()) {
                    throw new IllegalStateException(
                            address + ": " + new String(error.readAllBytes(), StandardCharsets.UTF_8));
                }
            }
            try (InputStream answer = connection.getInputStream()) {
                return JSON.readTree(answer);
            }
        } catch (IOException error) {
            throw new IllegalStateException(address, error);
        }
    }
}
