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

/**
 * Brokers outside this process, for one test. The program that started this process starts and ends them through its
 * HTTP interface ({@code tests/compat/upstream/outside.py}).
 */
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

    /** The addresses are in the order of the brokers' ids. */
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
     * Open brokers outside. `settings` have Kafka's names, and settings that the brokers outside do not know are left
     * out. `racks` are in the order of the brokers' ids, with an empty text for a broker without a rack.
     */
    public static Outside open(int brokers, Map<String, String> settings, List<String> racks, String test) {
        return open(brokers, 0, true, settings, racks, test);
    }

    /** If `combined`, the first brokers are also the controllers. Otherwise controllers have their own processes. */
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
     * Open brokers that have a listener with this security protocol beside the listener without authentication. They
     * know `scramUsers` from the beginning.
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

    /** Return addresses with the host name that brokers inside a test's process advertise. */
    private static String local(JsonNode made, String name) {
        return made.get(name).asText().replace("127.0.0.1", "localhost");
    }

    /** Return the addresses of the last opened brokers: the current test's, because tests run one after the other. */
    static String latest() {
        return latest;
    }

    /** Return the metrics addresses of the last opened brokers, or none if no listener has authentication. */
    static List<String> metrics() {
        return metrics;
    }

    public String bootstrap() {
        return bootstrap;
    }

    /** Return the addresses of the listeners with authentication, or the bootstrap addresses if there are none. */
    public String secured() {
        return secured;
    }

    /** Return the first broker's id. The ids of the others follow. */
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

    /** Start or stop a broker: `action` is start or stop, and `broker` counts from 0. */
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
