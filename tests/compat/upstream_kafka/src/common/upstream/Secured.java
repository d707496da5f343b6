package upstream;

import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyStore;
import java.security.cert.Certificate;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Consumer;
import javax.security.auth.login.AppConfigurationEntry;
import javax.security.auth.login.Configuration;
import org.apache.kafka.common.security.auth.SecurityProtocol;
import org.apache.kafka.common.security.plain.PlainLoginModule;
import org.apache.kafka.metadata.storage.Formatter;
import org.mockito.Mockito;
import org.mockito.stubbing.Answer;

/**
 * Settings and users that the brokers outside need for a test's clients: the users of the test's login file, its
 * certificate, and the users with which it formats its storage.
 */
public final class Secured {
    private static final String SERVER = "KafkaServer";
    private static final String USER = "user_";
    private static final List<String> OF_A_KEY_STORE = List.of(
            "ssl.keystore.location",
            "ssl.keystore.password",
            "ssl.keystore.type",
            "ssl.key.password",
            "ssl.truststore.location",
            "ssl.truststore.password",
            "ssl.truststore.type");

    private Secured() {}

    /** Return a broker's settings, with users and certificate in the settings instead of in files of this process. */
    public static Map<String, String> settings(Map<String, ?> given, SecurityProtocol protocol) {
        Map<String, String> settings = new HashMap<>();
        given.forEach((name, value) -> settings.put(name, text(value)));
        OF_A_KEY_STORE.forEach(settings::remove);
        if (protocol.name().startsWith("SASL_")) {
            plainUsers().forEach(module -> settings.put(
                    "listener.name." + protocol.name().toLowerCase() + ".plain.sasl.jaas.config", module));
        }
        if (protocol.name().endsWith("SSL")) {
            try {
                settings.putAll(certificate(given));
            } catch (IOException | GeneralSecurityException error) {
                throw new IllegalStateException(error);
            }
        }
        return settings;
    }

    private static String text(Object value) {
        return value instanceof org.apache.kafka.common.config.types.Password password
                ? password.value()
                : value instanceof List<?> list ? String.join(",", list.stream().map(String::valueOf).toList())
                : String.valueOf(value);
    }

    private static List<String> plainUsers() {
        List<String> modules = new ArrayList<>();
        AppConfigurationEntry[] entries = Configuration.getConfiguration().getAppConfigurationEntry(SERVER);
        for (AppConfigurationEntry entry : entries == null ? new AppConfigurationEntry[0] : entries) {
            if (entry.getLoginModuleName().equals(PlainLoginModule.class.getName())) {
                StringBuilder users = new StringBuilder();
                entry.getOptions().forEach((name, password) -> {
                    if (name.startsWith(USER)) {
                        users.append(" ").append(name).append("=\"").append(password).append("\"");
                    }
                });
                modules.add(PlainLoginModule.class.getName() + " required" + users + ";");
            }
        }
        return modules;
    }

    private static Map<String, String> certificate(Map<String, ?> given) throws IOException, GeneralSecurityException {
        char[] password = text(given.get("ssl.keystore.password")).toCharArray();
        char[] keyPassword = given.containsKey("ssl.key.password")
                ? text(given.get("ssl.key.password")).toCharArray()
                : password;
        KeyStore store = KeyStore.getInstance(text(given.get("ssl.keystore.type")));
        try (InputStream file = Files.newInputStream(Path.of(text(given.get("ssl.keystore.location"))))) {
            store.load(file, password);
        }
        String alias = store.aliases().nextElement();
        StringBuilder chain = new StringBuilder();
        for (Certificate each : store.getCertificateChain(alias)) {
            chain.append(pem("CERTIFICATE", each.getEncoded()));
        }
        return Map.of(
                "ssl.keystore.certificate.chain", chain.toString(),
                "ssl.keystore.key", pem("PRIVATE KEY", store.getKey(alias, keyPassword).getEncoded()));
    }

    private static String pem(String what, byte[] encoded) {
        String lines = Base64.getMimeEncoder(64, "\n".getBytes()).encodeToString(encoded);
        return "-----BEGIN " + what + "-----\n" + lines + "\n-----END " + what + "-----\n";
    }

    /** Return the users with which a test formats its storage, in the notation of kafka-storage. */
    @SuppressWarnings("unchecked")
    public static List<String> scramUsers(Consumer<Formatter> test) {
        List<String> users = new ArrayList<>();
        Formatter formatter = Mockito.mock(Formatter.class, (Answer<?>) asked -> {
            if (asked.getMethod().getName().equals("setScramArguments")) {
                users.addAll((List<String>) asked.getArgument(0));
            }
            return asked.getMock();
        });
        test.accept(formatter);
        return users;
    }
}
