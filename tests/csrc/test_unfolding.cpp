// Patches of images, compared with the definition. Sanitizers find pixels beyond an edge.
#include <cstdint>
#include <vector>

#include "check.h"
#include "unfolding.h"

using namespace lockstep;

TEST(patches_are_the_pixels_of_each_tap) {
  for (int64_t height : {1, 2, 5})
    for (int64_t width : {1, 4, 7})
      for (int64_t kernel : {1, 2, 3, 5})
        for (int64_t stride : {1, 2, 3})
          for (int64_t padding : {0, 1, 2, 4})
            for (int64_t dilation : {1, 2}) {
              const int64_t reach = dilation * (kernel - 1) + 1;
              const int64_t rows = (height + 2 * padding - reach) / stride + 1;
              const int64_t columns = (width + 2 * padding - reach) / stride + 1;
              if (height + 2 * padding < reach || width + 2 * padding < reach) continue;
              const ConvolutionShape shape{1,
                                           2,
                                           height,
                                           width,
                                           1,
                                           rows,
                                           columns,
                                           {kernel, kernel},
                                           {stride, stride},
                                           {padding, padding},
                                           {dilation, dilation}};
              const auto pixels = static_cast<size_t>(2 * height * width);
              std::vector<float> image(pixels), folded(pixels), sums(pixels);
              for (size_t i = 0; i < pixels; ++i) image[i] = static_cast<float>(i + 1);
              const int64_t first = rows / 3, count = (rows - first) * columns;
              std::vector<float> matrix(static_cast<size_t>(2 * kernel * kernel * count), -1);
              unfold(shape, image.data(), 2, first, rows, matrix.data(), count);
              std::vector<float> whole(static_cast<size_t>(2 * kernel * kernel * rows * columns));
              for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i % 1009);
              size_t at = 0, all = 0;
              for (int64_t c = 0; c < 2; ++c)
                for (int64_t i = 0; i < kernel; ++i)
                  for (int64_t j = 0; j < kernel; ++j)
                    for (int64_t row = 0; row < rows; ++row)
                      for (int64_t x = 0; x < columns; ++x, ++all) {
                        const int64_t from_y = row * stride - padding + i * dilation;
                        const int64_t from_x = x * stride - padding + j * dilation;
                        const bool is_pixel =
                            from_y >= 0 && from_y < height && from_x >= 0 && from_x < width;
                        const auto pixel =
                            static_cast<size_t>((c * height + from_y) * width + from_x);
                        if (is_pixel) sums[pixel] += whole[all];
                        if (row >= first) CHECK(matrix[at++] == (is_pixel ? image[pixel] : 0));
                      }
              fold(shape, whole.data(), rows * columns, 2, folded.data());
              CHECK(folded == sums);
            }
}
